"""The journal of a run's steps: what the ranks have reported of each, for whoever goes on from it.

    all ranks have made a step ─▶ note: the run's owner has it ─▶ the store is told

    rows      for a store that takes the place of a lost one      until a snapshot of the store has them
    reports   for the next command: to tell the store of them,    until the lines of their steps are written
              and to write their lines in metrics.jsonl

The owner keeps the reports in its memory, so a full disk stops no step. A step that was noted counts, whoever completes
it. A resume reads no journal: it begins with the snapshot of its checkpoint, and what came after is sampled again.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.orchestrator.cluster.owners import Owner
from penstock.workers.trainer.report import StepReport


class StepJournal:
    """Lifecycle: `note` each step once all ranks have made it; then `written` and `forget`, in any order."""

    def __init__(self, owner: Owner, last: int, unwritten: Mapping[int, Sequence[StepReport]] | None = None) -> None:
        """`last`: the last step before this process. `unwritten`: reports that the process before has noted, of steps
        whose lines are not written yet. A process after this one needs them, too."""
        self.last = last
        """The step that was made last."""
        self._owner = owner
        self._rows: dict[int, np.ndarray] = {}
        """Row ids by step."""
        self._unwritten: dict[int, Sequence[StepReport]] = dict(unwritten or {})

    async def note(self, step: int, reports: Sequence[StepReport]) -> None:
        """Note a step that all ranks have made, before the store is told of it. Raises `TakenOver`, and what a lost
        owner fails with."""
        self._rows[step] = np.concatenate([report.row_ids for report in reports])
        self._unwritten[step] = list(reports)
        self.last = step
        await self._owner.note(self._unwritten)

    def rows_after(self, step: int) -> list[list[int]]:
        """Row ids of each step after that one, in order."""
        return [self._rows[number].tolist() for number in range(step + 1, self.last + 1)]

    def forget(self, step: int) -> None:
        """Forget the rows of the steps up to that one: a snapshot of the store has them."""
        self._rows = {number: rows for number, rows in self._rows.items() if number > step}

    def written(self, step: int) -> None:
        """Note that the line of a step is written."""
        self._unwritten.pop(step, None)
