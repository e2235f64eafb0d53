"""Weights reach the engines once, and nobody waits for those of others."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.errors import DataError
from penstock.serve import samples
from penstock.serve.samples import Publications


@pytest.fixture(autouse=True)
def read(monkeypatch):
    monkeypatch.setattr(samples, "read_state", lambda file, *, with_optimizer: str(file))


class Engines:
    """Engines that publish when they are told to. `there`: names of what they have."""

    def __init__(self):
        self.there, self.published, self.may_go_on = [], [], asyncio.Event()
        self.may_go_on.set()

    async def publish(self, name, state):
        await self.may_go_on.wait()
        self.there.append(name)
        self.published.append(state)

    async def drop_sampler(self, name):
        self.there.remove(name)


async def until_waiting():
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_a_sample_from_weights_that_are_there_waits_for_no_publication():
    async def scenario():
        engines = Engines()
        weights = Publications(engines, most=4)
        first = await weights.name_of(Path("first"))
        engines.may_go_on.clear()
        arriving = [asyncio.create_task(weights.name_of(Path("second"))) for _ in range(3)]
        await until_waiting()
        assert await weights.name_of(Path("first")) == first
        arriving[0].cancel()  # the others still want it
        engines.may_go_on.set()
        second, third = await asyncio.gather(*arriving[1:])
        assert second == third != first
        assert engines.published == ["first", "second"]

    asyncio.run(scenario())


def test_what_rests_longest_makes_room_and_what_is_in_use_stays():
    async def scenario():
        engines = Engines()
        weights = Publications(engines, most=2)
        names = {}
        for file in ("a", "b", "c"):
            names[file] = await weights.name_of(Path(file))
        assert engines.there == list(names.values())  # all in use
        for file in ("b", "a"):
            await weights.release(names[file])
        assert await weights.name_of(Path("b")) == names["b"]
        await weights.name_of(Path("d"))
        assert names["a"] not in engines.there
        assert {names["b"], names["c"]} < set(engines.there)

    asyncio.run(scenario())


def test_deleted_weights_go_once_they_have_arrived_and_nobody_samples_from_them():
    async def scenario():
        engines = Engines()
        weights = Publications(engines, most=2)
        used = await weights.name_of(Path("used"))
        await weights.drop(Path("used"))
        assert engines.there == [used]
        await weights.release(used)
        assert engines.there == []
        engines.may_go_on.clear()
        arriving = asyncio.create_task(weights.name_of(Path("late")))
        await until_waiting()
        dropping = asyncio.create_task(weights.drop(Path("late")))
        engines.may_go_on.set()
        await asyncio.gather(dropping, arriving)
        assert arriving.result() in engines.there
        await weights.release(arriving.result())
        await weights.drop(Path("late"))
        assert engines.there == []

    asyncio.run(scenario())


def test_whoever_waits_hears_why_and_the_next_one_tries_again(monkeypatch):
    def broken(file, *, with_optimizer):
        raise DataError("cannot be read")

    async def scenario():
        engines = Engines()
        weights = Publications(engines, most=2)
        with monkeypatch.context() as patch:
            patch.setattr(samples, "read_state", broken)
            both = await asyncio.gather(*(weights.name_of(Path("a")) for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in both] == ["cannot be read"] * 2
        assert await weights.name_of(Path("a")) in engines.there

    asyncio.run(scenario())


@pytest.mark.parametrize("num_files", [1, 5])
def test_many_samples_at_once_publish_each_file_once(num_files):
    async def scenario():
        engines = Engines()
        weights = Publications(engines, most=8)
        files = [Path(f"{number % num_files}") for number in range(40)]
        names = await asyncio.gather(*(weights.name_of(file) for file in files))
        assert len(engines.published) == len(set(names)) == num_files
        for name in names:
            await weights.release(name)
        assert len(engines.there) == num_files

    asyncio.run(scenario())
