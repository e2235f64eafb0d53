"""Runs over several machines whose members, agents and power end at random moments: on a virtual clock the real
controller, fleet, relays and copies go on, or say why they must return to a checkpoint. None of them waits for ever.
`make chaos` has more."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.amounts import amount
from tests.chaos.plan import SEEDS
from tests.orchestrator.scripted_cluster import Cluster, ScriptedNodesFleet
from tests.orchestrator.scripted_fleet import controller_over, flow_of, scripted_config
from tests.run_files import metrics_of
from tests.store.invariants import check_invariants
from tests.virtual_time import run_virtually

RUNS = amount(6)
"""Runs of each seed, with each bound on staleness."""
NUM_STEPS = 20
GROUPS, SIZE = 4, 2
LONGEST_S = 200.0
"""Longest time without a step, in seconds of the virtual clock: nothing takes more than twenty."""


def config_of(tmp_path: Path, *words: str) -> Any:
    return scripted_config(
        tmp_path, f"trainer.max_steps={NUM_STEPS}", f"trainer.groups_per_step={GROUPS}",
        f"algorithm.group_size={SIZE}", "checkpoint.every_steps=2", "cluster.cpus_per_worker=0",
        "reward.cpus_per_worker=0", "faults.max_restarts=1000", "faults.pause_s=0.1", "faults.partner_share=1",
        "trainer.step_timeout_s=400", "rollout.start_timeout_s=60", "weights.phase_timeout_s=30", *words,
    )  # fmt: skip


async def harm(cluster: Cluster, fleet: ScriptedNodesFleet, random: Random, done: list[str]) -> None:
    """Kill a member, a node's agent, or a node, now and then, and bring nodes."""
    while True:
        await asyncio.sleep(random.expovariate(1 / 6.0))
        others = [node.id for node in cluster.nodes[1:]]
        if len(others) < 3:
            cluster.power_on()
            fleet.capacity.on_node()
        kind = random.choice(["member", "member", "member", "agent", "power", "store"])
        if kind == "member" and (names := list(fleet.actors)):
            name = random.choice(names)
            fleet.actors[name].kill()
            done.append(name)
        elif kind == "store":
            fleet.store.die()
            done.append("Store")
        elif others and kind == "agent" and (there := [node for node in others if node in fleet.agents.members]):
            fleet.agents.members[random.choice(there)][1].kill()
            done.append("Agent")
        elif len(others) > 1 and kind == "power":
            cluster.power_off(random.choice(others))
            done.append("power")


async def begun(cluster: Cluster, config: Any, random: Random) -> ScriptedNodesFleet:
    fleet = ScriptedNodesFleet(cluster, config, flow_of(config), random)
    fleet.create()
    await fleet.attach_trainers()
    return fleet


async def gone_through(fleet: ScriptedNodesFleet, harming: Coroutine[Any, Any, None], done: list[str]) -> None:
    """Make a run's steps while somebody harms it. Raises what the run fails with."""
    directory = RunDirectory.create(fleet.config)
    running = asyncio.ensure_future(controller_over(fleet, fleet.config, directory).run())  # type: ignore[arg-type]
    harm = asyncio.ensure_future(harming)
    steps, since, loop = -1, 0.0, asyncio.get_running_loop()
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=5)
            if (now := len(directory.read_metrics())) != steps:
                steps, since = now, loop.time()
            assert loop.time() - since < LONGEST_S, f"no step after {steps}: {done}"
        running.result()
    finally:
        harm.cancel()
        running.cancel()
        directory.close()


def test_engines_that_are_all_lost_with_their_nodes_start_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have taken the places of others. Each could leave for the other."""
    config, cluster = config_of(tmp_path, "rollout.num_workers=2", "max_staleness=1"), Cluster(4)
    cluster.patch(monkeypatch)

    async def lose_both(fleet: ScriptedNodesFleet) -> None:
        for _ in range(3):
            await asyncio.sleep(30)
            for node in {fleet.node_of(name) for name, _ in fleet.role("rollout")} & fleet.agents.members.keys():
                if node != cluster.nodes[0].id:
                    fleet.agents.members[node][1].kill()

    async def main() -> int:
        fleet = await begun(cluster, config, Random(1))
        await gone_through(fleet, lose_both(fleet), [])
        return len(fleet.role("rollout"))

    assert run_virtually(main()) == 2


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.histories
@pytest.mark.parametrize("seed", [RUNS * seed + number for seed in SEEDS for number in range(RUNS)])
def test_a_run_over_several_machines_goes_on_or_says_why_it_cannot(
    seed: int, max_staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, ranks = f"rollout.num_workers={1 + seed % 2}", f"trainer.num_ranks={1 + seed % 4 // 2}"
    config, random = config_of(tmp_path, f"max_staleness={max_staleness}", engines, ranks), Random(seed)
    cluster = Cluster(4)
    cluster.patch(monkeypatch)
    done: list[str] = []

    async def main() -> PenstockError | None:
        fleet = await begun(cluster, config, random)
        try:
            await gone_through(fleet, harm(cluster, fleet, random, done), done)
        except PenstockError as failure:
            return failure
        check_invariants(fleet.store.ledger)
        return None

    failure = run_virtually(main())
    if failure is not None:
        assert is_recoverable(failure), failure
        return
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line.get("staleness/max", 0) for line in lines) <= max_staleness
