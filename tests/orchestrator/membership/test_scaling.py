"""Engines that follow the cluster: as soon as there is room, and seldom where they do not start, on a virtual clock.
More and fewer engines of a session: between two calls, all or none."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import CannotScale, ResourceError, WeightError
from penstock.orchestrator.membership.scaling import FOLLOW_S, LONGEST_S, AutoscalerFollower, ScalableRole, next_look_s
from penstock.orchestrator.membership.scaling_requests import ScalingRequest, ScalingResult
from penstock.orchestrator.membership.supervisor import nothing_to_catch_up
from tests.orchestrator.scripted_fleet import ScriptedFleet, flow_of, scripted_config, store_of
from tests.virtual_time import run_virtually


class Cluster:
    """Has room for so many more at each look, of which so many start."""

    def __init__(self, *looks: tuple[int, int]) -> None:
        self._looks = list(looks)
        self.requests: list[tuple[float, ScalingRequest]] = []

    def num_engines_more(self) -> int:
        self._present = self._looks.pop(0) if self._looks else (0, 0)
        return self._present[0]

    async def change(self, requests: list[ScalingRequest]) -> list[ScalingResult]:
        self.requests += [(asyncio.get_running_loop().time(), request) for request in requests]
        return [ScalingResult("rollout", 1, joined=["Rollout-1 on node"] * self._present[1])]


def test_room_is_taken_when_there_and_asked_for_less_often_while_nothing_starts() -> None:
    cluster: Any = Cluster((0, 0), (2, 2), (1, 0), (1, 0), (1, 1), (1, 1))

    async def main() -> None:
        following = asyncio.ensure_future(AutoscalerFollower(cluster, cluster).run())
        await asyncio.sleep(100)
        following.cancel()

    run_virtually(main())
    one, two = ScalingRequest("rollout", 1, is_change=True), ScalingRequest("rollout", 2, is_change=True)
    assert cluster.requests == [(10.0, two), (15.0, one), (25.0, one), (45.0, one), (50.0, one)]


@given(st.lists(st.booleans(), max_size=20))
def test_looks_are_never_too_often_nor_too_seldom(came: list[bool]) -> None:
    pause_s = FOLLOW_S
    for one in came:
        pause_s = next_look_s(pause_s, 1, int(one))
        assert FOLLOW_S <= pause_s <= LONGEST_S
        assert not one or pause_s == FOLLOW_S
    assert next_look_s(pause_s, 0, 0) == FOLLOW_S


class Full(ScriptedFleet):
    """There is room for one more."""

    async def enlarge(self, role: str, stage: str | None) -> str:
        if len(self.role(role)) + self._joined >= 2:
            raise ResourceError("no node has room")
        return await super().enlarge(role, stage)


def over(
    make: type[ScriptedFleet], tmp_path: Path, catch_up: Any = nothing_to_catch_up
) -> tuple[ScriptedFleet, ScalableRole]:
    config = scripted_config(tmp_path)
    flow = flow_of(config)
    fleet = make(store_of(config, flow), config, flow, Random(1))
    return fleet, ScalableRole("rollout", fleet, config, catch_up)  # type: ignore[arg-type]


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
