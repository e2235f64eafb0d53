"""Copies of the state are made while the ranks make the next step (`faults.keep_beside`): whoever dies meanwhile, each
row is trained once, and a step that counts can be gone on from. On a virtual clock, over scripted ranks, whose weights
are the batches that they were trained on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.conf.errors import PartnerGone
from penstock.workers.protocols import Publication
from tests.amounts import amount
from tests.fakes.actors import FakeHandle
from tests.orchestrator import scripted_fleet
from tests.orchestrator.control import test_publishing_beside as beside
from tests.orchestrator.control.test_publishing_beside import NUM_RANKS, NUM_STEPS, SAID, Run
from tests.virtual_time import run_virtually

Weights = tuple[tuple[int, ...], ...]
COPIES: dict[int, dict[int, Weights]] = {}
"""Copies of each rank, by step: those of two steps, in the node's memory, whoever lives."""
SERVED: dict[int, dict[int, Weights]] = {}
"""What each version was sealed with, by rank."""


class Rank(beside.Rank):
    """Its weights are the rows of each batch that they were trained on."""

    def __init__(self, store: Any, rank: int, *more: Any) -> None:
        super().__init__(store, rank, *more)
        self._weights: Weights = ()

    async def step(self, step: int, *more: Any) -> Any:
        report = await super().step(step, *more)
        if report is not None:
            assert self._keeping is None or self._keeping.done()
            self._weights += (tuple(report.row_ids.tolist()),)
            assert len(self._weights) == step
        return report

    async def begin_keeping(self, step: int, epoch: int) -> None:
        await super().begin_keeping(step, epoch)
        copies = COPIES.setdefault(self._rank, {})
        for other in [number for number in copies if number not in (step - 1,)]:
            del copies[other]  # one slot of two is written over
        self._say("keeping", step)
        self._keeping = asyncio.create_task(self._copied(step, self._weights))

    async def _copied(self, step: int, weights: Weights) -> None:
        await self._pause(4.0)
        COPIES[self._rank][step] = weights
        self._say("kept", step)

    async def restore(self, step: int, epoch: int) -> None:
        assert step in COPIES[self._rank]
        self._weights = COPIES[self._rank][step]
        await super().restore(step, epoch)

    async def finish_publishing(self, version: int, epoch: int) -> Publication:
        publication = await super().finish_publishing(version, epoch)
        SERVED.setdefault(version, {})[self._rank] = self._published_weights
        return publication

    async def begin_publishing(self, root: str, version: int, epoch: int) -> None:
        await super().begin_publishing(root, version, epoch)
        self._published_weights = self._weights


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    COPIES.clear()
    SERVED.clear()
    monkeypatch.setattr(scripted_fleet, "Trainer", Rank)
    monkeypatch.setattr(Rank, "then", staticmethod(lambda what, number: None))


def started(tmp_path: Path, seed: int, *words: str) -> Run:
    return Run(tmp_path, seed, "faults.keep_beside=always", "max_staleness=1", *words)


def check(run: Run) -> None:
    """Rows are trained once. Versions are served of what was trained, and each step was kept before it was noted."""
    run.check()
    final = SERVED[NUM_STEPS]
    trained = [row for weights in final.values() for batch in weights for row in batch]
    assert len(trained) == len(set(trained)) == NUM_STEPS * 4 * 2
    for version, weights in SERVED.items():
        assert weights == {rank: final[rank][:version] for rank in range(NUM_RANKS)}
    for place, (what, number) in enumerate(SAID):
        if what == "noted":
            assert SAID[:place].count(("kept", number)) >= NUM_RANKS
        if what == "keeping" and number > 1:
            assert ("noted", number - 1) in SAID[:place]


def begun_before_kept() -> int:
    """Number of steps that were made or begun to be published before the step before, or the step itself, counted."""
    return sum(SAID.index(("begun", number)) < SAID.index(("noted", number)) for number in range(1, NUM_STEPS + 1))


def test_a_version_is_begun_and_the_next_batch_computed_before_a_step_counts(tmp_path: Path) -> None:
    async def main() -> None:
        run = started(tmp_path, 1)
        await run.controller()
        check(run)

    run_virtually(main())
    assert begun_before_kept() > NUM_STEPS / 2


@pytest.mark.parametrize("words", [("max_staleness=0",), ("faults.keep_beside=never",), ("faults.keep_beside=auto",)])
def test_without_it_copies_are_part_of_the_step(tmp_path: Path, words: tuple[str, ...]) -> None:
    async def main() -> None:
        run = started(tmp_path, 1, *words)
        await run.controller()
        run.check()

    run_virtually(main())
    assert not any(what == "keeping" for what, _ in SAID)


Event = tuple[str, int]


def lose_at(what: Event, lose: Callable[[Run], None], tmp_path: Path, seed: int = 1, *words: str) -> list[Event]:
    """Run with a loss at the first such event. Returns what was said since."""
    struck: list[int] = []

    async def main() -> None:
        run = started(tmp_path, seed, *words)

        def strike(*found: Any) -> None:
            if found == what and not struck:
                struck.append(len(SAID))
                asyncio.get_running_loop().call_soon(lose, run)

        Rank.then = staticmethod(strike)
        await run.controller()
        check(run)

    run_virtually(main())
    return SAID[struck[0] :]


PLACES = [("made", 4), ("keeping", 4), ("begun", 4), ("kept", 4), ("sealed", 4), ("made", 5), ("keeping", 5)]


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("name", ["Trainer-0", "Trainer-1"])
def test_a_rank_may_die_between_any_two_of_them(tmp_path: Path, what: Event, name: str) -> None:
    lose_at(what, lambda run: run.fleet.strike(name), tmp_path)


@pytest.mark.parametrize("what", PLACES)
def test_so_may_the_store(tmp_path: Path, what: Event) -> None:
    lose_at(what, lambda run: run.fleet.store.die(), tmp_path, 1, "faults.store_snapshot_s=3")


@pytest.mark.parametrize("what", PLACES)
def test_so_may_both(tmp_path: Path, what: Event) -> None:
    def lose(run: Run) -> None:
        run.fleet.store.die()
        run.fleet.strike("Trainer-1")

    lose_at(what, lose, tmp_path, 1, "faults.store_snapshot_s=3")


def test_a_step_that_did_not_count_is_made_again_and_its_version_published(tmp_path: Path) -> None:
    """One of the two ranks has begun to publish version 4, and none has copied its state yet."""
    after = lose_at(("begun", 4), lambda run: run.fleet.strike("Trainer-0"), tmp_path, 3)
    assert after.index(("made", 4)) < after.index(("noted", 4)) < after.index(("sealed", 4))
    assert after.index(("made", 4)) < after.index(("begun", 4), 1)


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(8)))
@pytest.mark.parametrize("snapshot_s", [0, 5])
def test_whoever_dies_each_row_is_trained_once(tmp_path: Path, seed: int, snapshot_s: int) -> None:
    """At most one rank in three steps: another would be a return to the checkpoint."""
    random, struck, others = Random(seed), set[int](), set[int]()

    async def main() -> None:
        run = started(tmp_path, seed, f"faults.store_snapshot_s={snapshot_s}", f"max_staleness={1 + seed % 3}")

        def strike(what: str, number: int) -> None:
            if random.random() > 0.1:
                return
            loop, when = asyncio.get_running_loop(), random.uniform(0.0, 3.0)
            name = random.choice(["Trainer-0", "Trainer-1", "Rollout-0", "store"])
            if name.startswith("Trainer") and number not in struck:
                struck.update(range(number - 2, number + 3))
                loop.call_later(when, run.fleet.strike, name)
            elif not name.startswith("Trainer") and number not in others:
                others.add(number)
                loop.call_later(when, lambda: run.fleet.store.die() if name == "store" else run.fleet.strike(name))

        Rank.then = staticmethod(strike)
        await run.controller()
        check(run)

    run_virtually(main())
    assert struck
    assert others


@pytest.mark.parametrize("what", [("made", 4), ("keeping", 4), ("begun", 4), ("kept", 4), ("made", 5)])
def test_the_next_command_goes_on_with_the_step_that_counts(
    tmp_path: Path, what: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHandle, "outlives_callers", True)

    async def main() -> None:
        run, ended = started(tmp_path, 1), asyncio.Event()
        Rank.then = staticmethod(lambda *found: ended.set() if found == what else None)
        running = run.controller()
        await ended.wait()
        running.cancel()
        await asyncio.wait([running])
        noted = max(number for what, number in SAID if what == "noted")
        point = await run.taken_up()
        assert point.step == noted
        await run.controller(point)
        check(run)

    run_virtually(main())


def test_a_rank_that_has_another_step_makes_none(tmp_path: Path) -> None:
    async def main() -> None:
        run = started(tmp_path, 1)
        rank = run.fleet.role("trainer")[0][1].actor
        with pytest.raises(PartnerGone, match="has the state after step 0, not 1"):
            await rank.step(2, False, 0)

    run_virtually(main())
