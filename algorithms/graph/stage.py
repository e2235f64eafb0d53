"""One node of a dataflow: what it reads, what it writes, and what becomes ready as a whole.

Made by the methods of `dataflow.py`, looked at by whoever turns a dataflow into actors, columns or a picture.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.graph.columns import Column

UNITS = ("sample", "group", "batch")
PROVIDED_BY_TRAINER = ("logprobs", "old_logprobs", "entropy", "mask", "totals", "group_ids", "values", "scores")
"""Arguments of a loss that are no columns: see `workers/trainer/update/loss_inputs.py`."""


@dataclass(frozen=True)
class Stage:
    """One node. `unit` is what becomes ready and is leased as a whole: a sample, a whole group, or the step's batch."""

    name: str
    kind: str
    """source, rollout, greedy_rollout, reward, logprobs, scores, values, staleness, compute, filter, critic, train"""
    unit: str
    reads: tuple[str, ...]
    writes: tuple[Column, ...]
    model: str | None = None
    function: Callable[..., Any] | None = None
    """compute: the function. train: the loss. reward: the reward, or None for the one that `reward.function` names."""
    optional_reads: tuple[str, ...] = ()
    """Read if some stage writes them: arguments of the loss with a default."""
    reason: str = ""
    """filter: what its dropped rows are counted under."""
    state: Any = None
    """compute per batch: what the function is given as `state` at the first step; None for a function without."""
    rewarded: Any = None
    """reward: which of several it is (`WeightedRewardConfig`); None for the one that `reward.function` names."""
    in_environment: bool = False
    """rollout: an environment has the policy sample, in any number of turns (`environment.py`)."""

    @property
    def is_in_trainer(self) -> bool:
        """Run by the trainers on the step's whole batch, before the update: the store knows nothing of it."""
        return self.unit == "batch" and self.kind in ("compute", "values", "staleness", "critic")

    @property
    def is_scored(self) -> bool:
        """Of a model with a scalar head for whole responses, served or trained."""
        trained = self.kind == "train" and "scores" in inspect.signature(self.function).parameters  # type: ignore[arg-type]
        return self.kind == "scores" or trained

    @property
    def takes_groups(self) -> bool:
        """The loss compares the samples of a group, so that none is cut apart."""
        return self.kind == "train" and "group_ids" in inspect.signature(self.function).parameters  # type: ignore[arg-type]


def written_by(stages: Iterable[Stage]) -> dict[str, Column]:
    """Every column that one of these stages writes, by name."""
    return {column.name: column for stage in stages for column in stage.writes}


def reads_of(stage: Stage, stages: Iterable[Stage]) -> tuple[str, ...]:
    """All that a stage gets: what it must have, and what it may have and one of `stages` writes. Training waits for
    every filter."""
    stages = list(stages)
    written = written_by(stages)
    optional = (name for name in stage.optional_reads if name in written)
    verdicts = (one.writes[0].name for one in stages if one.kind == "filter") if stage.kind == "train" else ()
    return tuple(dict.fromkeys((*stage.reads, *optional, *verdicts)))
