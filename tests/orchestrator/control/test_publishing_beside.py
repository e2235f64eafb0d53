"""A version is written while the ranks make the next step, which counts only once the version is sealed: whoever dies
meanwhile, ranks or the command. On a virtual clock, over scripted ranks."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.recovery.takeover import TakeoverPoint, settle_ranks
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.protocols import Publication
from penstock.workers.trainer.step_report import StepReport
from tests.amounts import amount
from tests.fakes.actors import FakeHandle
from tests.orchestrator import scripted_fleet
from tests.orchestrator.scripted_fleet import ScriptedFleet, controller_over, flow_of, scripted_config, store_of
from tests.run_files import metrics_of
from tests.virtual_time import run_virtually

NUM_STEPS, NUM_RANKS = 12, 2
SAID: list[tuple[str, int]] = []
"""begun n, sealed n and made n by each rank, noted n by the controller, in order."""
Then = Callable[[str, int], None]


class NotingOwner(Owner):
    """Keeps what was noted last for the next controller."""

    def __init__(self) -> None:
        self.noted: dict[int, Sequence[StepReport]] = {}

    async def note(self, steps: Any) -> None:
        SAID.append(("noted", max(steps)))
        self.noted = dict(steps)
        await asyncio.sleep(0)


class Rank(scripted_fleet.Trainer):
    then: Then = staticmethod(lambda what, number: None)
    """Called with what has happened."""

    def _say(self, what: str, number: int) -> None:
        SAID.append((what, number))
        self.then(what, number)

    async def step(self, step: int, *more: Any) -> Any:
        report = await super().step(step, *more)
        self._say("made", step)
        return report

    async def begin_publishing(self, root: str, version: int, epoch: int) -> None:
        await super().begin_publishing(root, version, epoch)
        self._say("begun", version)

    async def finish_publishing(self, version: int, epoch: int) -> Publication:
        publication = await super().finish_publishing(version, epoch)
        self._say("sealed", version)
        return publication


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    monkeypatch.setattr(scripted_fleet, "Trainer", Rank)
    monkeypatch.setattr(Rank, "then", staticmethod(lambda what, number: None))


class Run:
    """A run whose controllers may end one after the other."""

    def __init__(self, tmp_path: Path, seed: int, *words: str) -> None:
        self.config = scripted_config(
            tmp_path, f"trainer.max_steps={NUM_STEPS}", f"trainer.num_ranks={NUM_RANKS}", "rollout.num_workers=2",
            "faults.max_restarts=1000", "faults.pause_s=0.1", "checkpoint.every_steps=0", *words,
        )  # fmt: skip
        flow = flow_of(self.config)
        self.fleet = ScriptedFleet(store_of(self.config, flow), self.config, flow, Random(seed))
        self.owner = self.fleet.owner = NotingOwner()
        self.directory = RunDirectory.create(self.config)

    def controller(self, taken: TakeoverPoint | None = None) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(controller_over(self.fleet, self.config, self.directory, taken=taken).run())

    async def taken_up(self) -> TakeoverPoint:
        fleet: Any = self.fleet
        noted = self.owner.noted
        return TakeoverPoint.of(await settle_ranks(fleet, noted), noted, self.directory.read_metrics())

    def check(self) -> None:
        """Every step counts once, and after the version before it."""
        self.directory.close()
        lines = metrics_of(self.directory.path)
        assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
        assert lines[-1]["store/rows_trained"] == NUM_STEPS * 4 * 2
        assert not any(line.get("dropped/stale") for line in lines)
        for place, (what, number) in enumerate(SAID):
            if what == "noted" and number > 1:
                assert SAID[:place].count(("sealed", number - 1)) >= NUM_RANKS


def made_before_sealed() -> int:
    """Number of steps that a rank has made before the version before was sealed."""
    return sum(("sealed", number) in SAID[SAID.index(("made", number + 1)) :] for number in range(1, NUM_STEPS))


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_with_staleness_a_step_is_made_before_the_version_before_is_sealed(tmp_path: Path, max_staleness: int) -> None:
    async def main() -> None:
        run = Run(tmp_path, 1, f"max_staleness={max_staleness}")
        await run.controller()
        run.check()

    run_virtually(main())
    assert bool(made_before_sealed()) is (max_staleness > 0)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(4)))
def test_no_step_is_noted_before_that_whoever_dies(tmp_path: Path, max_staleness: int, seed: int) -> None:
    """At most one rank a step: another would be a return to the checkpoint."""
    random, struck = Random(seed), set[int]()

    async def main() -> None:
        run = Run(tmp_path, seed, f"max_staleness={max_staleness}")

        def strike(what: str, number: int) -> None:
            if random.random() < 0.15 and number not in struck:
                struck.update((number - 1, number, number + 1))
                name = random.choice(["Trainer-0", "Trainer-1"])
                asyncio.get_running_loop().call_later(random.uniform(0.0, 2.0), run.fleet.strike, name)

        Rank.then = staticmethod(strike)
        await run.controller()
        run.check()

    run_virtually(main())
    assert struck


@pytest.mark.parametrize("what", [("begun", 3), ("made", 4), ("sealed", 3)])
def test_ranks_that_take_the_place_of_lost_ones_publish_the_version_first(
    tmp_path: Path, what: tuple[str, int]
) -> None:
    """They die when one of them has begun to write version 3, has made the step after, or has ended."""
    struck: list[int] = []

    async def main() -> None:
        run = Run(tmp_path, 1, "max_staleness=1")

        def strike(*found: Any) -> None:
            if found == what and not struck:
                struck.append(len(SAID))
                for rank in ("Trainer-0", "Trainer-1"):
                    asyncio.get_running_loop().call_soon(run.fleet.strike, rank)

        Rank.then = staticmethod(strike)
        await run.controller()
        run.check()

    run_virtually(main())
    after = SAID[struck[0] :]
    assert after.index(("begun", 3)) < after.index(("sealed", 3)) < after.index(("noted", 4))
    assert after.index(("begun", 3)) < after.index(("made", 4))


@pytest.mark.parametrize("what", [("begun", 3), ("made", 4)])
def test_the_next_command_publishes_again_what_ranks_had_under_way(
    tmp_path: Path, what: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for their writing, which goes on without a command: ranks begin no version beside another."""
    monkeypatch.setattr(FakeHandle, "outlives_callers", True)

    async def main() -> None:
        run, ended = Run(tmp_path, 1, "max_staleness=1"), asyncio.Event()
        Rank.then = staticmethod(lambda *found: ended.set() if found == what and ("sealed", 3) not in SAID else None)
        running = run.controller()
        await ended.wait()
        running.cancel()
        await asyncio.wait([running])
        assert ("noted", 4) not in SAID
        point = await run.taken_up()
        assert point.step == 3
        SAID.append(("taken", 0))
        await run.controller(point)
        run.check()

    run_virtually(main())
    after = SAID[SAID.index(("taken", 0)) :]
    assert after.index(("begun", 3)) < after.index(("sealed", 3)) < after.index(("noted", 4))
