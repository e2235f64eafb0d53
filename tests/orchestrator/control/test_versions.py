"""A version that is lost on its way, with ranks or with their node, is published again: by ranks that come in their
place, and only if they have its step."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import WeightError, WorkerDied
from penstock.conf.faults import FaultsConfig
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.control.step_loop import StepLoop
from penstock.orchestrator.recovery.decisions import RunFaults
from penstock.orchestrator.recovery.restart import Recovery, Restarts
from penstock.orchestrator.run_directory.timeline import Timeline
from penstock.workers.protocols import Publication

DEATH = WorkerDied("the node of a rank is gone")


async def nothing(*_: Any) -> None:
    pass


class Bed:
    """Stands where the weights, the store, the supervisor and the in-memory checkpoints do. `trained`: the step that
    new ranks have."""

    incarnation = 0
    publishes_beside = can_reconnect = True
    journal = SimpleNamespace(last=0)

    def __init__(self, trained: int, *, beside: bool = False) -> None:
        self.said: list[str] = []
        self.sealed: list[Publication] = []
        self.needs_republication, self._trained = False, trained
        self.loaded: dict[str, float] = {}
        self.loads: list[Callable[[Publication], Any]] = []
        """What loading comes to, call by call; afterwards it works."""
        trainer = SimpleNamespace(collective_timeout_s=60.0)
        config: Any = SimpleNamespace(
            faults=FaultsConfig(), trainer=trainer, max_staleness=int(beside), keeps_beside=False
        )
        fleet = SimpleNamespace(
            role=lambda role: [("Trainer-0", None)], kill=lambda names: None, resumed=None, owner=Owner()
        )
        self.timeline = Timeline()
        directory: Any = SimpleNamespace(timeline=self.timeline)
        context: Any = SimpleNamespace(config=config, fleet=fleet, directory=directory, progress=None)
        everyone: Any = self
        recovery = Recovery(Restarts(directory, print, RunFaults(config.faults)), everyone, everyone)
        self.loop = StepLoop(context, recovery, everyone, everyone, everyone, everyone)

    @property
    def has_lost_source(self) -> bool:
        return self.needs_republication

    async def begin(self, version: int) -> None:
        self.said.append(f"publish {version}")
        await asyncio.sleep(0.01)
        self.needs_republication = False

    async def finish(self, version: int) -> Publication:
        await asyncio.sleep(0.01)
        return Publication("root", version)

    def published(self, delivery: Publication) -> None:
        self.sealed.append(delivery)

    async def load(self, delivery: Publication) -> float:
        self.said.append(f"load {delivery.version}")
        if self.loads:
            await self.loads.pop(0)(delivery)
        return 0.1

    async def replace(self, *_: Any) -> None:
        self.said.append("replace")
        await asyncio.sleep(0.01)

    async def named(self, team: list[str], failure: Exception) -> Exception:
        return failure

    async def wait_for_restart(self, failure: Exception, incarnation: int) -> bool:
        return False

    async def take_back_batch(self) -> int:
        return self._trained

    async def are_available(self, step: int) -> bool:
        return True

    generation = copy = served = connect = nothing

    def lose_ranks(self) -> Awaitable[None]:
        return self.loop.recover(DEATH, self.loop.incarnation)


async def published(bed: Bed) -> Publication:
    await bed.loop.publish(1)
    delivery: Any = await bed.loop.seal()
    return delivery  # type: ignore[no-any-return]


def failing(bed: Bed, error: Exception) -> Callable[[Publication], Any]:
    async def fail(_: Publication) -> None:
        bed.needs_republication = True
        raise error

    return fail


@pytest.mark.parametrize("beside", [False, True])
def test_the_timeline_tells_what_a_step_waits_for_from_what_publishes_beside_it(*, beside: bool) -> None:
    bed = Bed(1, beside=beside)

    async def body() -> None:
        await bed.loop.publish(1)
        waiting = asyncio.ensure_future(bed.loop.wait_for_seal(2))
        await asyncio.sleep(0)
        assert waiting.done() is not beside
        await bed.loop.seal()
        await waiting
        await bed.loop.wait_for_seal(2)

    asyncio.run(body())
    spans = [(span.lane, span.name, span.details["version"]) for span in bed.timeline.take()]
    more = {("weights", "publish", 1), ("trainer", "wait for the version before", 1)} if beside else set()
    assert spans[0] == ("trainer", "publish", 1)
    assert set(spans[1:]) == more


@pytest.mark.parametrize("trained", [0, 1])
def test_ranks_that_come_before_a_version_is_sealed_publish_it_again(trained: int) -> None:
    """Only those that have its step: with others the run returns."""
    bed = Bed(trained, beside=True)

    async def body() -> None:
        await bed.loop.publish(1)
        await bed.lose_ranks()
        assert (await bed.loop.seal()).version == 1

    if trained == 1:
        asyncio.run(body())
        assert bed.said == ["publish 1", "replace", "publish 1"]
    else:
        with pytest.raises(WorkerDied, match="node of a rank"):
            asyncio.run(body())


def test_a_version_that_was_lost_on_its_way_is_published_again_and_loaded() -> None:
    bed = Bed(trained=1)
    bed.loads = [failing(bed, DEATH)]

    async def body() -> None:
        delivery = await published(bed)
        await bed.loop.load(delivery)

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "replace", "publish 1", "load 1"]
    assert bed.sealed == [Publication("root", 1)]  # the observer hears of a version once


def test_ranks_that_have_made_another_step_since_cannot_publish_it() -> None:
    bed = Bed(trained=2)
    bed.loads = [failing(bed, DEATH)]

    async def body() -> None:
        delivery = await published(bed)
        await bed.loop.load(delivery)

    with pytest.raises(WorkerDied, match="node of a rank"):
        asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "replace"]


def test_what_others_give_up_to_publish_it_again_is_waited_for() -> None:
    """The next step has noticed the loss first: the engines' load fails while the ranks are replaced."""
    bed = Bed(trained=1)
    under_way = asyncio.Event()

    async def given_up(_: Publication) -> None:
        bed.needs_republication = True
        under_way.set()
        while bed.said[-1] != "publish 1" or bed.said.count("publish 1") < 2:
            await asyncio.sleep(0)
        raise WeightError("given up for a newer one")

    async def body() -> None:
        delivery = await published(bed)
        bed.loads = [given_up]
        loading = asyncio.ensure_future(bed.loop.load(delivery))
        await under_way.wait()
        await bed.lose_ranks()
        await loading

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "replace", "publish 1", "load 1"]


@pytest.mark.parametrize(("trained", "more"), [(1, ["publish 1", "load 1"]), (2, [])])
def test_a_version_is_published_again_for_new_engines_unless_the_next_is_near(trained: int, more: list[str]) -> None:
    bed = Bed(trained)

    async def body() -> None:
        delivery = await published(bed)
        await bed.loop.load(delivery)
        await bed.loop.report_served(1)
        bed.needs_republication = True
        await asyncio.gather(bed.lose_ranks(), bed.lose_ranks())  # two have noticed it

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "replace", *more]


def test_ranks_that_die_while_they_publish_it_again_are_replaced_as_well() -> None:
    bed = Bed(trained=1)
    publishing = bed.begin

    async def body() -> None:
        delivery = await published(bed)
        await bed.loop.load(delivery)
        await bed.loop.report_served(1)
        failures = [WorkerDied("another node is gone")]

        async def begin(version: int) -> None:
            if failures:
                raise failures.pop()
            await publishing(version)

        bed.begin, bed.needs_republication = begin, True  # type: ignore[method-assign]
        await bed.lose_ranks()

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "replace", "replace", "publish 1", "load 1"]


def test_whoever_notices_a_loss_may_end_and_the_ranks_come_back_all_the_same() -> None:
    bed = Bed(trained=1)

    async def body() -> None:
        noticed, incarnation = asyncio.ensure_future(bed.lose_ranks()), bed.loop.incarnation
        await asyncio.sleep(0)
        noticed.cancel()
        await asyncio.wait([noticed])
        await bed.loop.recover(DEATH, incarnation)
        assert bed.loop.incarnation.ranks == 1

    asyncio.run(body())
    assert bed.said == ["replace"]


def test_an_error_of_an_engine_is_raised() -> None:
    bed = Bed(trained=1)
    bed.loads = [failing(bed, WeightError("bad checksum"))]

    async def body() -> None:
        delivery = await published(bed)
        await bed.loop.load(delivery)

    with pytest.raises(WeightError, match="bad checksum"):
        asyncio.run(body())
