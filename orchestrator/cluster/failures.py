"""Finds which of several failures is the cause of the others, and tells all of them.

    user's data or code, settings, bugs  ▸  the death of a process  ▸  deadlines  ▸  a partner or the store is gone

Processes that wait for each other fail together, and which failure comes first is chance: a rank's "another rank is
gone" comes before Ray's notice of the death. Whether a new process helps, says `ray_calls.is_recoverable`. A failure
that may be a consequence is held back for `CAUSE_GRACE_S`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from penstock.conf.errors import DeadlineExceeded, LeaseExpired, PartnerGone, PenstockError, WorkerDied, WorkerFailed
from penstock.store.errors import RowsLost, RowsUnreachable, StoreClosed, StoreUnreachable

T = TypeVar("T")

CAUSE_GRACE_S = 3.0
"""Seconds that a consequence waits for its cause: Ray tells of a death within a second on a machine that is not
overloaded."""
MAX_OTHERS = 5
MAX_OTHER_CHARS = 200


class Kind(IntEnum):
    """Kinds of failures: lower ones explain higher ones."""

    ERROR = 0
    """An error of the user's data or code, of settings, or a bug: it would come again."""
    DEATH = 1
    LATE = 2
    CONSEQUENCE = 3
    """A partner, the store or a node is gone."""


def kind_of(error: BaseException) -> Kind:
    if isinstance(error, PartnerGone | StoreClosed | StoreUnreachable | RowsUnreachable | RowsLost):
        return Kind.CONSEQUENCE
    if isinstance(error, DeadlineExceeded | LeaseExpired):
        return Kind.LATE
    if isinstance(error, WorkerDied) and not isinstance(error, WorkerFailed):
        return Kind.DEATH
    return Kind.ERROR


def is_cause(error: BaseException) -> bool:
    """Return whether an error needs no other failure to be explained."""
    return kind_of(error) <= Kind.DEATH


def cause_of(failures: Sequence[BaseException]) -> BaseException:
    """The failure that explains the others, the first of its kind; its message lists them in short."""
    cause = min(failures, key=kind_of)  # the first of several that are equal
    told = {_line(cause)}
    others = [line for line in dict.fromkeys(map(_line, failures)) if line not in told]
    if not others:
        return cause
    listed = [f"  {line}" for line in others[:MAX_OTHERS]]
    listed += [f"  and {len(others) - MAX_OTHERS} more"] if len(others) > MAX_OTHERS else []
    text = "\n".join(["What failed with it:", *listed])
    if isinstance(cause, PenstockError):
        return type(cause)(f"{cause}\n{text}")
    cause.add_note(text)
    return cause


def leaves(failures: BaseExceptionGroup[Any]) -> list[Any]:
    """Failures in an exception group, in order, also of groups within it."""
    found: list[Any] = []
    for error in failures.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def held_back(work: Awaitable[T], grace_s: float = CAUSE_GRACE_S) -> T:
    """Await work and return its result. In a task group, an error that may be a consequence is raised once another task
    has failed, or after the grace."""
    try:
        return await work
    except PenstockError as error:
        if not is_cause(error):
            with contextlib.suppress(asyncio.CancelledError):  # the task group ends: this failure is part of it
                await asyncio.sleep(grace_s)
        raise


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {first_line(error)}"
    return text if len(text) <= MAX_OTHER_CHARS else text[: MAX_OTHER_CHARS - 1] + "…"
