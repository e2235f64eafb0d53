"""What a step leaves for those who go on from it: another store, and the next command."""

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import TakenOver
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.recovery.restart import StepJournal


class Report:
    def __init__(self, *rows: int) -> None:
        self.row_ids = np.array(rows)


class Keeper(Owner):
    """Keeps what was noted last."""

    noted: dict[int, Any]

    async def note(self, steps: Any) -> None:
        self.noted = dict(steps)


def note(journal: StepJournal, step: int, *reports: Any) -> None:
    asyncio.run(journal.note(step, reports))


def test_another_store_is_told_of_each_step_that_no_snapshot_has() -> None:
    journal = StepJournal(Owner(), 4)
    note(journal, 5, Report(1, 2), Report(3))
    note(journal, 6, Report(4, 5, 6))
    assert (journal.last, journal.rows_after(4)) == (6, [[1, 2, 3], [4, 5, 6]])
    journal.forget(5)
    assert (journal.rows_after(5), journal.rows_after(6)) == ([[4, 5, 6]], [])


def test_the_next_command_has_the_reports_of_steps_whose_lines_are_not_written() -> None:
    owner = Keeper()
    journal = StepJournal(owner, 0)
    first, second, third = Report(1), Report(2), Report(3)
    note(journal, 1, first)
    note(journal, 2, second)
    assert owner.noted == {1: [first], 2: [second]}
    journal.written(1)
    note(journal, 3, third)
    assert owner.noted == {2: [second], 3: [third]}


def test_a_command_that_took_over_leaves_what_was_not_written_before_it() -> None:
    """It may die as well, before it has written that line."""
    owner, before = Keeper(), Report(1)
    journal = StepJournal(owner, 1, {1: [before]})  # type: ignore[list-item]
    own = Report(2)
    note(journal, 2, own)
    assert owner.noted == {1: [before], 2: [own]}
    journal.written(1)
    note(journal, 3, third := Report(3))
    assert owner.noted == {2: [own], 3: [third]}


def test_a_step_that_another_command_has_taken_is_refused() -> None:
    class Refusing(Owner):
        async def note(self, steps: Any) -> None:
            raise TakenOver("another goes on with the run")

    with pytest.raises(TakenOver):
        note(StepJournal(Refusing(), 0), 1, Report(1))
