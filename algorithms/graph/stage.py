"""A node of a dataflow: what it reads, what it writes, and what becomes ready as a whole.

The methods of `dataflow.py` make stages; actors, columns and pictures are made from them.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.graph.columns import Column

UNITS = ("sample", "group", "batch")
PROVIDED_BY_TRAINER = ("logprobs", "old_logprobs", "entropy", "mask", "totals", "group_ids", "values", "scores")
"""Arguments of a loss that are no columns: see `workers/trainer/update/minibatches.py`."""


@dataclass(frozen=True)
class Stage:
    """A node. `unit` is what becomes ready and is leased as a whole: a sample, a whole group, or the step's batch."""

    name: str
    kind: str
    """Kind: source, rollout, greedy_rollout, reward, logprobs, scores, values, staleness, compute, filter, critic,
    train."""
    unit: str
    reads: tuple[str, ...]
    writes: tuple[Column, ...]
    model: str | None = None
    function: Callable[..., Any] | None = None
    """Function of the stage. compute: the function. train: the loss. reward: the reward, or None for the one that
    `reward.function` names."""
    optional_reads: tuple[str, ...] = ()
    """Columns that are read if some stage writes them: arguments of the loss with a default."""
    reason: str = ""
    """Reason that a filter's dropped rows are counted under."""
    state: Any = None
    """Value of `state` at the first step, for a compute stage per batch; None for a function without."""
    rewarded: Any = None
    """Reward that a reward stage computes, of several (`WeightedRewardConfig`); None for the one that `reward.function`
    names."""
    in_environment: bool = False
    """True for a rollout in which an environment has the policy sample, in any number of turns (`environment.py`)."""

    @property
    def is_in_trainer(self) -> bool:
        """True for a stage that the trainers run on the step's whole batch, before the update: the store knows nothing
        of it."""
        return self.unit == "batch" and self.kind in ("compute", "values", "staleness", "critic")

    @property
    def is_scored(self) -> bool:
        """True for a model with a scalar head for whole responses, served or trained."""
        trained = self.kind == "train" and "scores" in inspect.signature(self.function).parameters  # type: ignore[arg-type]
        return self.kind == "scores" or trained

    @property
    def takes_groups(self) -> bool:
        """True if the loss compares the samples of a group, so that none is cut apart."""
        return self.kind == "train" and "group_ids" in inspect.signature(self.function).parameters  # type: ignore[arg-type]


def written_by(stages: Iterable[Stage]) -> dict[str, Column]:
    """Every column that one of these stages writes, by name."""
    return {column.name: column for stage in stages for column in stage.writes}


def reads_of(stage: Stage, stages: Iterable[Stage]) -> tuple[str, ...]:
    """All columns that a stage gets: those that it must have, and those that it may have and one of `stages` writes.
    Training waits for every filter."""
    stages = list(stages)
    written = written_by(stages)
    optional = (name for name in stage.optional_reads if name in written)
    verdicts = (one.writes[0].name for one in stages if one.kind == "filter") if stage.kind == "train" else ()
    return tuple(dict.fromkeys((*stage.reads, *optional, *verdicts)))
