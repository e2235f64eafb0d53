"""Which calls bring a version from the trainers to the engines, and that there are none where nobody waits for it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.weight_sync import WeightSync
from penstock.workers.protocols import Publication


class Handle:
    """An actor that notes what it was asked, in the order of all."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def __getattr__(self, method: str) -> Any:
        name, said = self.name, self.said

        class Method:
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                said.append(f"{name} {method}")
                return Publication("v", arguments[1]) if method == "publish" else None

        return Method


class Fleet:
    def __init__(self, said: list[str], num_engines: int) -> None:
        self.said, self.numbers = said, {"trainer": 2, "rollout": num_engines}

    def role(self, role: str) -> list[tuple[str, Any]]:
        return [(f"{role}-{index}", Handle(f"{role}-{index}", self.said)) for index in range(self.numbers[role])]


@pytest.mark.parametrize(
    ("num_engines", "expected"),
    [
        (0, []),
        (1, ["trainer-0 publish", "trainer-1 publish", "rollout-0 load"]),
    ],
)
def test_a_version_is_written_where_an_engine_loads_it_and_only_there(
    tmp_path: Path, num_engines: int, expected: list[str]
) -> None:
    said: list[str] = []

    async def body() -> None:
        sync = WeightSync(Fleet(said, num_engines), RunConfig(), tmp_path)  # type: ignore[arg-type]
        await sync.connect()
        delivery = await sync.publish(3)
        assert delivery.version == 3
        assert await sync.load(delivery) < 10

    asyncio.run(body())
    assert said == expected
