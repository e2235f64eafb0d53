"""More and fewer engines of a session: between two calls, all or none."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.conf.errors import CannotScale, ResourceError, WeightError
from penstock.orchestrator.membership.by_hand import ByHand
from penstock.orchestrator.membership.supervisor import nothing_to_catch_up
from tests.orchestrator.scripted_fleet import ScriptedFleet, flow_of, scripted_config, store_of
from tests.virtual_time import run_virtually


class Full(ScriptedFleet):
    """There is room for one more."""

    async def enlarge(self, role: str, stage: str | None) -> str:
        if len(self.role(role)) + self._joined >= 2:
            raise ResourceError("no node has room")
        return await super().enlarge(role, stage)


def over(
    make: type[ScriptedFleet], tmp_path: Path, catch_up: Any = nothing_to_catch_up
) -> tuple[ScriptedFleet, ByHand]:
    config = scripted_config(tmp_path)
    flow = flow_of(config)
    fleet = make(store_of(config, flow), config, flow, Random(1))
    return fleet, ByHand("rollout", fleet, config, catch_up)  # type: ignore[arg-type]


def test_engines_are_added_and_the_last_ones_removed(tmp_path: Path) -> None:
    async def main() -> None:
        fleet, engines = over(ScriptedFleet, tmp_path)
        names = await engines.added(2)
        assert [name for name, _ in fleet.role("rollout")] == ["Rollout-0", *names]
        assert await engines.removed(1, None) == names[1:]
        assert len(engines) == len(fleet.role("rollout")) == 2
        with pytest.raises(CannotScale, match="one has to stay"):
            await engines.removed(2, 1.0)
        with pytest.raises(CannotScale, match="no number of members"):
            await engines.added(0)
        assert len(engines) == 2

    run_virtually(main())


def test_where_not_all_can_come_none_does(tmp_path: Path) -> None:
    async def fail(_: Any) -> None:
        await asyncio.sleep(1)
        raise WeightError("no version")

    async def main() -> None:
        fleet, engines = over(Full, tmp_path)
        with pytest.raises(ResourceError):
            await engines.added(2)
        assert len(engines) == len(fleet.role("rollout")) == 1
        fleet, engines = over(ScriptedFleet, tmp_path, fail)
        with pytest.raises(WeightError):
            await engines.added(1)
        assert len(engines) == len(fleet.role("rollout")) == 1
        _, engines = over(ScriptedFleet, tmp_path, None)
        with pytest.raises(CannotScale, match="met at the start"):
            await engines.added(1)

    run_virtually(main())
