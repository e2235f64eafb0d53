"""Waiting for actors: every wait has a deadline, and every failure arrives as one of Penstock's own errors.

Used by the fleet, the controller and the imperative handles.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from penstock.conf.errors import DeadlineExceeded, PenstockError, WorkerDied


def translate(error: Exception, name: str) -> Exception:
    """What an actor raised, without Ray's wrapping; its death as `WorkerDied`. Others are returned as they are."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, PenstockError):
            return cause
        if isinstance(cause, RayActorError):
            return WorkerDied(f"an actor that {name} depends on has died: {cause}")
        return WorkerDied(f"{name} failed with {type(cause).__name__}: {cause}\n{_tail(str(error))}")
    if isinstance(error, RayActorError):
        return WorkerDied(
            f"{name} has died ({_first_line(str(error))}). Its log is in Ray's session directory, "
            "/tmp/ray/session_latest/logs; out of memory is the usual reason (rollout.kv_cache_gib, "
            "trainer.max_tokens_per_microbatch)."
        )
    return error


async def answer(ref: Awaitable[Any], *, name: str, phase: str, timeout_s: float) -> Any:
    """The result of one actor call. Raises `DeadlineExceeded` naming who did not answer in which phase."""
    try:
        return await asyncio.wait_for(asyncio.ensure_future(_as_coroutine(ref)), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{phase}: {name} did not answer within {timeout_s:g} s.") from None
    except (RayTaskError, RayActorError) as error:
        raise translate(error, name) from None


async def answers(calls: Sequence[tuple[str, Awaitable[Any]]], *, phase: str, timeout_s: float) -> list[Any]:
    """The results of several actor calls, in order. The first failure ends the wait for all."""
    tasks = [asyncio.ensure_future(answer(ref, name=name, phase=phase, timeout_s=timeout_s)) for name, ref in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def get_all(calls: Iterable[tuple[str, Any]], *, phase: str, timeout_s: float) -> list[Any]:
    """The same for synchronous callers."""
    deadline = time.monotonic() + timeout_s
    results = []
    for name, ref in calls:
        try:
            results.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise DeadlineExceeded(f"{phase}: {name} did not answer within {timeout_s:g} s.") from None
        except (RayTaskError, RayActorError) as error:
            raise translate(error, name) from None
    return results


async def _as_coroutine(ref: Awaitable[Any]) -> Any:
    return await ref


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def _tail(text: str, num_lines: int = 12) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
