"""Environments hear of the engines when these change, and looking costs a comparison, however many there are."""

import asyncio
from typing import Any

from penstock.orchestrator.control.members import EngineDirectory
from tests.fakes.actors import FakeHandle


class Environment:
    def __init__(self) -> None:
        self.heard: list[list[str]] = []
        self.is_there = True

    def engines(self, engines: list[tuple[str, Any]]) -> None:
        if not self.is_there:
            raise ConnectionError
        self.heard.append([name for name, _ in engines])


class Engines(list[tuple[str, Any]]):
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Engines.num_compared += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


class Fleet:
    def __init__(self, num_environments: int) -> None:
        self.engines = [("Rollout-0", object())]
        self.environments = [(f"Environment-{number}", FakeHandle(Environment())) for number in range(num_environments)]

    def role(self, role: str) -> list[tuple[str, Any]]:
        return Engines(self.engines) if role == "rollout" else list(self.environments)


def test_each_environment_hears_of_each_change_once_and_is_told_until_it_hears() -> None:
    fleet = Fleet(2)
    directory: Any = EngineDirectory(fleet)  # type: ignore[arg-type]
    one, two = (handle.actor for _, handle in fleet.environments)

    async def scenario() -> None:
        assert await directory.tell()
        assert await directory.tell()
        assert one.heard == two.heard == [["Rollout-0"]]
        two.is_there = False
        fleet.engines.append(("Rollout-1", object()))
        assert not await directory.tell()
        two.is_there = True
        assert await directory.tell()
        assert one.heard == two.heard == [["Rollout-0"], ["Rollout-0", "Rollout-1"]]
        fleet.engines[0] = ("Rollout-0", object())  # another took its place
        fleet.environments[1] = ("Environment-1", FakeHandle(Environment()))
        await directory.tell()
        assert len(one.heard) == 3
        assert fleet.environments[1][1].actor.heard == [["Rollout-0", "Rollout-1"]]

    asyncio.run(scenario())


def test_a_look_compares_the_engines_once() -> None:
    fleet = Fleet(50)
    directory = EngineDirectory(fleet)  # type: ignore[arg-type]
    asyncio.run(directory.tell())
    Engines.num_compared = 0
    asyncio.run(directory.tell())
    assert Engines.num_compared == 1
