"""Which calls bring a version from the trainers to the engines, and that there are none where nobody waits for it."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.weight_sync import WeightSync
from tests.orchestrator.noting_actors import NotingActors


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
    actors = NotingActors({"trainer": 2, "rollout": num_engines}, tmp_path)

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        delivery = await sync.publish(3)
        assert delivery.version == 3
        assert await sync.load(delivery) < 10

    asyncio.run(body())
    assert actors.said == expected
