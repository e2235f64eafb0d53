"""Engines as Ray actors: every call goes to all, and the first failure comes back as that engine's own error."""

from typing import Any

import pytest
import ray

from penstock.conf.errors import WeightError, WorkerDied
from penstock.workers.weights.engine_calls import ActorEngines, Info, StreamPart

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("cluster")]


class Engine:
    """Writes down what it is told. `trouble`: what `deliver` does."""

    def __init__(self, trouble: str = "") -> None:
        self._told: list[Any] = []
        self._trouble = trouble

    async def connect(self, info: Info) -> None:
        self._told.append(info)

    async def deliver(self, part: StreamPart) -> None:
        if self._trouble == "refuse":
            raise WeightError("phase load: cannot")
        if self._trouble == "die":
            import os

            os._exit(1)
        if self._trouble == "wait":
            import asyncio

            await asyncio.sleep(60)
        self._told.append(part)

    async def told(self) -> list[Any]:
        return self._told


def engines(*troubles: str) -> tuple[ActorEngines, list[Any]]:
    handles = [ray.remote(Engine).options(num_cpus=0).remote(trouble) for trouble in troubles]
    return ActorEngines([(f"Rollout-{index}", handle) for index, handle in enumerate(handles)]), handles


def test_each_engine_gets_its_own_beginning_and_every_part() -> None:
    group, handles = engines("", "")
    assert group.num_engines == 2
    group.connect([{"rank_offset": 1}, {"rank_offset": 2}])
    group.deliver(StreamPart(1, {"names": ["a"]}))
    group.deliver(StreamPart(1, None))
    for index, told in enumerate(ray.get([handle.told.remote() for handle in handles])):
        assert told == [{"rank_offset": index + 1}, StreamPart(1, {"names": ["a"]}), StreamPart(1, None)]


def test_an_engines_own_error_comes_back_though_another_still_works() -> None:
    group, _ = engines("wait", "refuse")
    with pytest.raises(WeightError, match="phase load: cannot"):
        group.deliver(StreamPart(1, None))


def test_an_engine_that_dies_is_named() -> None:
    group, _ = engines("", "die")
    with pytest.raises(WorkerDied, match="Rollout-1 has died"):
        group.deliver(StreamPart(1, None))
