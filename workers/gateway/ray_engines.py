"""Asks a rollout actor for a turn. No other module of the gateway uses Ray."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from penstock.conf.errors import DataError, PenstockError, WorkerDied
from penstock.workers.protocols import Completion, Sampling


async def ask(handle: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """Sample a response of the engine behind a handle. A call that is cancelled ends there, too. Raises `WorkerDied`
    for an engine that is gone, `DataError` for a request that makes it fail, and what it raises of Penstock's
    errors."""
    asked = handle.generate.remote([list(prompt_ids)], 1, [sampling])
    try:
        ((completion,),) = await asked
    except asyncio.CancelledError:
        ray.cancel(asked, recursive=False)  # else it is decoded to its end for nobody
        raise
    except PenstockError:  # Ray raises an error of the actor's as one of its class, too
        raise
    except RayActorError as error:
        raise WorkerDied(f"an engine died in a turn: {error}") from None
    except RayTaskError as error:  # it lives, and would fail at the same request again
        raise DataError(f"an engine failed at a turn: {error.cause!r:.300}") from None
    except RayError as error:
        raise WorkerDied(f"an engine could not be asked for a turn: {error}") from None
    return completion
