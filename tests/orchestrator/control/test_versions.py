"""A version that is lost on its way, with ranks or with their node, is published again: by ranks that come in their
place, and only if they have its step."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.conf.errors import PenstockError, WeightError, WorkerDied
from penstock.orchestrator.control.versions import Versions
from penstock.orchestrator.run_directory.timeline import Timeline
from penstock.workers.protocols import Publication

DEATH = WorkerDied("the node of a rank is gone")


class Turns:
    async def generation(self) -> None:
        pass


class Bed:
    """Stands where the weights, the ranks, the store and its recovery do. `trained`: the step that new ranks have."""

    def __init__(self, trained: int) -> None:
        self.said: list[str] = []
        self.generation, self.is_cut_off, self._trained = 0, False, trained
        self.loaded: dict[str, float] = {}
        self.loads: list[Callable[[Publication], Any]] = []
        """What loading comes to, call by call; afterwards it works."""
        self.versions = Versions(self, self, Turns(), self, self, self, Timeline(), 0)  # type: ignore[arg-type]

    async def publish(self, version: int) -> Publication:
        self.said.append(f"publish {version}")
        await asyncio.sleep(0.01)
        self.is_cut_off = False
        return Publication("root", version)

    async def load(self, delivery: Publication) -> float:
        self.said.append(f"load {delivery.version}")
        if self.loads:
            await self.loads.pop(0)(delivery)
        return 0.1

    async def recover(self, failure: PenstockError) -> int:
        self.said.append("recover")
        await asyncio.sleep(0.01)
        self.generation += 1
        return self._trained

    async def with_store(self, call: Callable[[], Any]) -> None:
        result = call()
        if result is not None:
            await result

    def published(self, version: int) -> None:
        pass


def failing(bed: Bed, error: Exception) -> Callable[[Publication], Any]:
    async def fail(_: Publication) -> None:
        bed.is_cut_off = True
        raise error

    return fail


def test_a_version_that_was_lost_on_its_way_is_published_again_and_loaded() -> None:
    bed = Bed(trained=1)
    bed.loads = [failing(bed, DEATH)]

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        await bed.versions.load(delivery)

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "recover", "publish 1", "load 1"]


def test_ranks_that_have_made_another_step_since_cannot_publish_it() -> None:
    bed = Bed(trained=2)
    bed.loads = [failing(bed, DEATH)]

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        await bed.versions.load(delivery)

    with pytest.raises(WorkerDied, match="node of a rank"):
        asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "recover"]


def test_what_others_give_up_to_publish_it_again_is_waited_for() -> None:
    """The next step has noticed the loss first: the engines' load fails while that renews the ranks."""
    bed = Bed(trained=1)
    under_way = asyncio.Event()

    async def given_up(_: Publication) -> None:
        bed.is_cut_off = True
        under_way.set()
        while bed.said[-1] != "publish 1" or bed.said.count("publish 1") < 2:
            await asyncio.sleep(0)
        raise WeightError("given up for a newer one")

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        bed.loads = [given_up]
        loading = asyncio.ensure_future(bed.versions.load(delivery))
        await under_way.wait()
        await bed.versions.renew(DEATH, 0)
        await loading

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "recover", "publish 1", "load 1"]


@pytest.mark.parametrize(("trained", "more"), [(1, ["publish 1", "load 1"]), (2, [])])
def test_a_version_is_published_again_for_new_engines_unless_the_next_is_near(trained: int, more: list[str]) -> None:
    bed = Bed(trained)

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        await bed.versions.load(delivery)
        await bed.versions.tell(1)
        bed.is_cut_off = True
        await bed.versions.renew(DEATH, 0)
        await bed.versions.renew(DEATH, 0)  # another has noticed it, too

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "recover", *more]


def test_ranks_that_die_while_they_publish_it_again_are_replaced_as_well() -> None:
    bed = Bed(trained=1)
    publishing = bed.publish

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        await bed.versions.load(delivery)
        await bed.versions.tell(1)
        failures = [WorkerDied("another node is gone")]

        async def publish(version: int) -> Publication:
            if failures:
                raise failures.pop()
            return await publishing(version)

        bed.publish, bed.is_cut_off = publish, True  # type: ignore[method-assign]
        await bed.versions.renew(DEATH, 0)

    asyncio.run(body())
    assert bed.said == ["publish 1", "load 1", "recover", "recover", "publish 1", "load 1"]


def test_an_error_of_an_engine_is_raised() -> None:
    bed = Bed(trained=1)
    bed.loads = [failing(bed, WeightError("bad checksum"))]

    async def body() -> None:
        delivery, _ = await bed.versions.publish(1)
        await bed.versions.load(delivery)

    with pytest.raises(WeightError, match="bad checksum"):
        asyncio.run(body())
