"""Samples whose log-probabilities are no numbers: which ones, and whether the engine's weights may be the cause.

Such a sample can be neither trained nor compared. It is dropped as `dropped/bad_logprobs`, and the run ends where too
many are (`rollout.max_error_share`).
"""

import math
from collections.abc import Sequence
from typing import Any

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Completion, RolloutEngine

NUM_SHOWN = 5
"""Tokens of a prompt, or names of weights, in a message."""


async def fault_of(engine: RolloutEngine, name: str, prompt_ids: Sequence[int], completion: Completion) -> str:
    """What is wrong with a sample that is not finite, and with the engine's weights. `name`: of the engine. Raises
    `WorkerDied`."""
    place = next(index for index, value in enumerate(completion.logprobs) if not math.isfinite(value))
    shown = ", ".join(map(str, prompt_ids[:NUM_SHOWN])) + (", …" if len(prompt_ids) > NUM_SHOWN else "")
    return (
        f"{name}: the log-probability of token {place + 1} of {len(completion.logprobs)} is "
        f"{completion.logprobs[place]}, at version {completion.versions[place]}, after a prompt of {len(prompt_ids)} "
        f"tokens ({shown}). {await _weights_of(engine)}"
    )


async def _weights_of(engine: RolloutEngine) -> str:
    try:
        names = await engine.nonfinite_weights()
    except WeightError as error:
        return f"Whether its weights are finite is not known: {error}"
    if not names:
        return "Its weights are all finite: the cause is in what the engine computes."
    more = ", …" if len(names) > NUM_SHOWN else ""
    return f"{len(names)} of its weights are not finite: {', '.join(names[:NUM_SHOWN])}{more}."


def nonfinite(model: Any) -> list[str]:
    """Names of a module's parameters that are not finite numbers."""
    return [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
