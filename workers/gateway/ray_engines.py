"""Asks a rollout actor for a turn. The one place of the gateway that knows Ray."""

from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError

from penstock.conf.errors import PenstockError, WorkerDied
from penstock.workers.protocols import Completion, Sampling


async def ask(handle: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """One response of the engine behind a handle. Raises `WorkerDied` for one that is gone, and what the engine
    raises."""
    try:
        ((completion,),) = await handle.generate.remote([list(prompt_ids)], 1, [sampling])
    except PenstockError:  # Ray raises an error of the actor's as one of its class, too
        raise
    except RayActorError as error:
        raise WorkerDied(f"an engine died in a turn: {error}") from None
    except RayError as error:
        raise WorkerDied(f"an engine could not be asked for a turn: {error}") from None
    return completion
