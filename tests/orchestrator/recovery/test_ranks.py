"""Ranks in the middle of anything are brought to the last step, or given up."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import MemoryCheckpointError
from penstock.orchestrator.recovery import takeover
from penstock.orchestrator.recovery.takeover import APART_S, settle_ranks
from penstock.workers.runtime.serving import IDLE, PUBLISHING, UPDATING, Progress
from tests.fakes.actors import FakeHandle
from tests.virtual_time import run_virtually

TRAINED, EPOCH = 7, 2


class Rank:
    """Says that it is busy for so long, in virtual time; `after`: the step whose state it has."""

    def __init__(self, busy_s: float = 0.0, after: int | None = TRAINED, phase: str = UPDATING) -> None:
        self._busy_s, self.after, self._phase = busy_s, after, phase
        self.restored: list[int] = []
        self.is_dead = self.has_copy = False

    def progress(self) -> Progress:
        return Progress(self._phase if asyncio.get_running_loop().time() < self._busy_s else IDLE, 0.0)

    def after_step(self) -> int | None:
        return self.after

    def restore(self, step: int, epoch: int) -> None:
        assert epoch == EPOCH
        if not self.has_copy:
            raise MemoryCheckpointError("no copy")
        self.restored.append(step)


class Fleet:
    config = SimpleNamespace(trainer=SimpleNamespace(step_timeout_s=600.0, collective_timeout_s=60.0))
    store = None
    owner = SimpleNamespace(epoch=EPOCH)

    def __init__(self, members: Sequence[Rank]) -> None:
        self.members = list(members)
        self.handles = [FakeHandle(rank) for rank in members]
        for rank, handle in zip(members, self.handles, strict=True):
            if rank.is_dead:
                handle.kill()
        self.killed: list[str] = []

    def role(self, _: str) -> list[tuple[str, FakeHandle]]:
        return [(f"Trainer-{number}", handle) for number, handle in enumerate(self.handles)]

    async def attach_trainers(self) -> None:
        """Nobody waits for a batch."""

    def kill(self, names: Sequence[str]) -> None:
        self.killed = list(names)


class Store:
    """Knows of the last step."""

    def __init__(self, _: Any) -> None:
        """Whose it is does not matter here."""

    async def settle(self, _: str, epoch: int) -> int:
        assert epoch == EPOCH
        return TRAINED

    async def leave(self) -> None:
        """Nothing is held."""


def taken_up(monkeypatch: pytest.MonkeyPatch, *members: Rank) -> Fleet:
    monkeypatch.setattr(takeover, "StoreClient", Store)
    monkeypatch.setattr(takeover.time, "monotonic", lambda: asyncio.get_running_loop().time())
    fleet = Fleet(members)
    assert run_virtually(settle_ranks(fleet, {})) == TRAINED  # type: ignore[arg-type]
    return fleet


def test_ranks_that_have_the_state_of_the_last_step_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = taken_up(monkeypatch, Rank(), Rank())
    assert not fleet.killed
    assert [rank.restored for rank in fleet.members] == [[], []]


def test_ranks_are_waited_for_and_a_step_that_does_not_count_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Rank(busy_s=300.0, after=TRAINED + 1), Rank(busy_s=301.0, after=TRAINED + 1)]
    for rank in members:
        rank.has_copy = True
    fleet = taken_up(monkeypatch, *members)
    assert not fleet.killed
    assert [rank.restored for rank in members] == [[TRAINED], [TRAINED]]


@pytest.mark.parametrize(
    "members",
    [
        [Rank(busy_s=2 * APART_S, phase=PUBLISHING), Rank()],
        [Rank(busy_s=10_000.0), Rank(busy_s=10_000.0)],
        [Rank(after=TRAINED + 1), Rank(after=TRAINED + 1)],
        [Rank(after=None), Rank()],
    ],
    ids=["one waits for a call that never comes", "all for ever", "no copy", "an update failed"],
)
def test_ranks_that_cannot_be_brought_there_are_ended(members: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken_up(monkeypatch, *members).killed == [f"Trainer-{number}" for number in range(len(members))]


def test_so_are_all_where_one_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Rank(), Rank()]
    members[0].is_dead = True
    assert len(taken_up(monkeypatch, *members).killed) == 2
