"""Which checkpoints stay: the newest, the best, those of every so many steps, and those whose score is to come. Pure.

A score is what the evaluation of a checkpoint's version has measured. It may come before the checkpoint is complete, or
after later ones are.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.conf.faults import CheckpointConfig


def score_of(evaluated: Mapping[str, Any], config: CheckpointConfig) -> float | None:
    """The score of a version by what was measured of it; None: it has none."""
    value = evaluated.get(config.best_metric)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def ranked(scores: Mapping[int, float], config: CheckpointConfig) -> list[int]:
    """Steps from the best score to the worst. Of equal scores the earlier step is better: it took less training.

    >>> ranked({5: 0.8, 10: 0.9, 15: 0.9}, CheckpointConfig())
    [10, 15, 5]
    """
    sign = 1 if config.best_mode == "min" else -1
    return sorted(scores, key=lambda step: (sign * scores[step], step))


def steps_to_remove(
    steps: Sequence[int], scores: Mapping[int, float], awaited: Collection[int], config: CheckpointConfig
) -> list[int]:
    """Steps whose checkpoints need not stay. `steps`: all that are complete, ascending. `awaited`: those whose
    evaluation has not ended.

    >>> steps_to_remove([5, 10, 15, 20, 25], {5: 0.8, 10: 0.2}, {20}, CheckpointConfig(keep_last=1, keep_best=1))
    [10, 15]
    """
    every = config.keep_every_steps
    kept = {*steps[-config.keep_last :], *ranked(scores, config)[: config.keep_best], *awaited}
    return [step for step in steps if step not in kept and not (every and step % every == 0)]
