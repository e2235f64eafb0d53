"""Engines and rewards that come and go at random moments, and die in between, alone or with their nodes: the accounts
are exact. On a virtual clock: the real controller, members, supervisor and store over scripted actors."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.conf.errors import CannotScale
from penstock.orchestrator.control.scaling_requests import ScalingRequest
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.amounts import amount
from tests.orchestrator.scripted_fleet import (
    GROUPS,
    NUM_STEPS,
    SIZE,
    ScriptedFleet,
    controller_over,
    flow_of,
    long_config,
    store_of,
)
from tests.run_files import metrics_of
from tests.store.invariants import check_invariants
from tests.virtual_time import run_virtually


def config_of(tmp_path: Path, *words: str) -> Any:
    return long_config(tmp_path, "rollout.num_workers=2", *words)


async def scale(members: Any, random: Random, done: list[Any]) -> None:
    """Now and then more or fewer of one role or both, with much time to finish, or with none."""
    while True:
        await asyncio.sleep(random.expovariate(1 / 3.0))
        roles = random.choice([["rollout"], ["reward"], ["rollout", "reward"]])
        requests = [ScalingRequest(role, random.randint(-2, 2), is_change=True) for role in roles]
        with contextlib.suppress(CannotScale):
            done += await members.change(requests, random.choice([0.0, 1.0, 60.0]))


async def kill(fleet: ScriptedFleet, random: Random) -> None:
    while True:
        await asyncio.sleep(random.expovariate(1 / 25.0))
        fleet.strike(
            random.choice([name for role in ("rollout", "reward") for name, _ in fleet.role(role)] or ["nobody"])
        )


async def power_off(fleet: ScriptedFleet, random: Random) -> None:
    """Nodes that joined."""
    while True:
        await asyncio.sleep(random.expovariate(1 / 30.0))
        if nodes := [node for node, _, _ in fleet.later_nodes]:
            fleet.power_off(random.choice(nodes))


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(6)))
def test_whoever_joins_and_leaves_each_row_is_trained_once_within_its_bound(
    max_staleness: int, seed: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"max_staleness={max_staleness}")
    random, done = Random(seed), list[Any]()

    async def main() -> dict[str, float]:
        flow = flow_of(config)
        store = store_of(config, flow)
        fleet = ScriptedFleet(store, config, flow, random)
        directory = RunDirectory.create(config)
        controller = controller_over(fleet, config, directory)
        others = [asyncio.ensure_future(scale(controller.members, random, done))]
        if seed % 2:
            others.append(asyncio.ensure_future(kill(fleet, random)))
        if seed % 4 >= 2:
            others.append(asyncio.ensure_future(power_off(fleet, random)))
        await asyncio.wait_for(controller.run(), 1e6)
        for other in others:
            other.cancel()
        directory.close()
        check_invariants(store.ledger)
        return await store.stats()

    numbers = run_virtually(main())
    assert numbers["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
    assert not any(value for name, value in numbers.items() if name.startswith("dropped/"))
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line.get("staleness/max", 0) for line in lines) <= max_staleness
    assert all(line["rollout/num_engines"] >= 0 for line in lines)
    events = RunDirectory.open(tmp_path / "run").read_events()
    joined, left = ([event["member"] for event in events if event["kind"] == kind] for kind in ("joined", "left"))
    assert len(joined) == len(set(joined)) >= sum(len(one.joined) for one in done)
    assert len(left) == len(set(left)) >= sum(len(one.left) for one in done)
    assert joined or left
    faults = [event["member"] for event in events if event["kind"] == "fault"]
    assert seed % 4 or not faults  # to leave is no fault
    kinds = {event["kind"] for event in events} - {"hint", "warning"}  # of times that are scripted
    assert kinds <= {"joined", "left", "join_failed", "fault", "recovered", "node_left"}
    assert seed % 4 < 2 or "node_left" in kinds


def test_members_that_were_wished_for_before_a_return_join_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_staleness=0")
    wanted = {"rollout": config.rollout.least_workers + 2}

    async def main() -> int:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        directory = RunDirectory.create(config)
        controller = controller_over(fleet, config, directory, wanted=wanted)
        await asyncio.wait_for(controller.run(), 1e6)
        directory.close()
        return len(fleet.role("rollout"))

    assert run_virtually(main()) == wanted["rollout"]
    events = RunDirectory.open(tmp_path / "run").read_events()
    assert [event["kind"] for event in events].count("joined") == 2


def test_who_has_joined_before_the_others_serve_is_kept_once(tmp_path: Path) -> None:
    """A node was lost as another process drove the run, and somebody takes the place of who was there."""
    config, kept = config_of(tmp_path, "max_staleness=0"), list[str]()

    async def main() -> None:
        fleet = ScriptedFleet(store_of(config, flow_of(config)), config, flow_of(config), Random(1))
        directory = RunDirectory.create(config)
        members = controller_over(fleet, config, directory).members

        async def keep(role: str, team: Sequence[str], catch_up: Any) -> None:
            kept.extend(team)

        members.supervisor.keep = keep  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            members.begin(tasks)
            await members.change([ScalingRequest("rollout", config.rollout.least_workers + 1)])
            members.serve("rollout")
            await asyncio.sleep(0)
            members.close()
        directory.close()

    run_virtually(main())
    assert sorted(kept) == sorted({*kept})
    assert len(kept) == config.rollout.least_workers + 1
