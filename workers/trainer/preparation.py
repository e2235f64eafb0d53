"""The work of the trainers on the step's whole batch before the policy's update: stages per batch, in order.

    compute   this rank's rows ─▶ gather over ranks ─▶ function on all rows ─▶ columns of this rank's rows
              (what such a function carries from step to step is its state, the same on every rank)
    staleness version of the update - token_versions
    values    this rank's rows ─▶ critic ─▶ old_values
    critic    this rank's rows ─▶ critic.update

Statistics over the batch (REINFORCE++'s deviation, whitening) are thus over all of it, whatever the number of ranks:
every rank computes the same, in order of row id.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.store.data.rows import Rows
from penstock.workers.compute.compute_worker import ComputeWorker
from penstock.workers.protocols import Loss, UpdateReport
from penstock.workers.trainer.checkpointing.plain_data import states_from_text, states_to_text
from penstock.workers.trainer.replay import Replay
from penstock.workers.trainer.update.tally import with_explained_variance

REPLAY = "trainer.replay"
"""Name of the state of what is trained again."""
CRITIC = "critic"
"""Prefix of the critic's metrics."""
Gather = Callable[[Any], list[Any]]
"""Gathers a picklable value of each rank, in order of rank. Collective."""


class Critic(Protocol):
    """The interface of a critic for its stages: `workers/trainer/scalar.py`."""

    def values(self, rows: Rows) -> list[np.ndarray]: ...

    def update(self, rows: Rows, loss: Loss) -> UpdateReport: ...


class Carrier(Protocol):
    """The interface of whoever carries something from step to step."""

    state: Any


class Preparation:
    """The stages of a dataflow that run in its trainers.

    rows, metrics = Preparation(flow.in_trainer, flow.columns, ranks.gather).apply(rows, version)
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        columns: dict[str, Column],
        gather: Gather,
        critic: Critic | None = None,
        replay: Replay | None = None,
        *,
        is_saved: bool = False,
    ) -> None:
        """`critic`: for the stages that ask for one. `replay`: of rows of earlier steps; None: none are. `is_saved`:
        checkpoints are taken, so what functions carry must be plain data, which the first step checks."""
        self._stages = stages
        self._starts = {stage.name: stage.state for stage in stages if stage.state is not None}
        self._untried = is_saved
        self.workers = {stage.name: ComputeWorker(stage, columns) for stage in stages if stage.kind == "compute"}
        self._gather = gather
        self._critic, self._replay = critic, replay
        self._carriers: dict[str, Carrier] = {**self.workers}
        if replay is not None:
            self._starts[REPLAY], self._carriers[REPLAY] = replay.state, replay

    def carried(self) -> str:
        """States that functions carry from step to step, for checkpoints. Raises `DataflowError` for a state that is no
        plain data."""
        return states_to_text({name: self._carriers[name].state for name in self._starts}, self._starts)

    def resume(self, carried: str) -> None:
        """Go on from carried states. Raises `CheckpointError` if they are of other stages."""
        for name, state in states_from_text(carried, self._starts).items():
            self._carriers[name].state = state

    def apply(self, rows: Rows, version: int) -> tuple[Rows, dict[str, float]]:
        """Return these rows with the columns that the stages write, after them those that are trained again, and the
        metrics of critic, states and replay. `version`: of the policy that is about to be updated. Collective,
        also for a rank without rows. Raises `DataflowError` if a function returns what its stage does not declare, or
        carries what cannot be saved."""
        metrics: dict[str, float] = {}
        for stage in self._stages:
            if stage.kind == "compute":
                worker = self.workers[stage.name]
                rows = self._computed(worker, rows)
                metrics |= {f"actor/{name}": value for name, value in getattr(worker.state, "metrics", {}).items()}
                continue
            if stage.kind == "staleness":
                rows = _with_ages(rows, stage, version)
                continue
            assert self._critic is not None
            if stage.kind == "values":
                rows = rows.with_column(stage.writes[0].name, self._critic.values(rows))
            else:
                assert stage.function is not None
                metrics |= with_explained_variance(self._critic.update(rows, stage.function).metrics, CRITIC)
        if self._replay is not None:
            again, found = self._replay.again(rows, version)
            metrics |= found
            if again is not None:
                for stage in self._stages:
                    again = _with_ages(again, stage, version) if stage.kind == "staleness" else again
                rows = Rows.concat([rows, again]) if len(rows) else again
        if self._untried:
            self.carried()
            self._untried = False
        return rows, metrics

    def _computed(self, worker: ComputeWorker, rows: Rows) -> Rows:
        everybody = [part for part in self._gather(_only(rows, worker.stage.reads)) if len(part)]
        if not everybody:
            return rows
        together = Rows.concat(everybody) if len(everybody) > 1 else everybody[0]
        order = np.argsort(together.row_ids, kind="stable")
        results = worker.apply(together.select(order))
        mine = np.searchsorted(together.row_ids[order], rows.row_ids)
        for name, values in results.items():
            rows = rows.with_column(name, [values[position] for position in mine.tolist()])
        return rows


def _with_ages(rows: Rows, stage: Stage, version: int) -> Rows:
    """The rows with the column of a stage `staleness`."""
    ages = [version - versions.astype(np.float32) for versions in rows.arrays(stage.reads[0])]
    return rows.with_column(stage.writes[0].name, ages)


def _only(rows: Rows, names: Sequence[str]) -> Rows:
    return Rows(rows.row_ids, rows.group_ids, rows.table().select(list(names)))
