"""Engines that are lent at random moments, and die meanwhile: they keep their version, and the accounts are exact. On a
virtual clock: the real controller, loans, supervisor and store over scripted actors."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.protocols import Publication
from penstock.workers.rollout.engine_scripted import ScriptedEngine
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
    return long_config(tmp_path, "rollout.num_workers=4", *words)


async def lend(fleet: ScriptedFleet, loans: Any, random: Random, seen: list[tuple[str, int, int]]) -> None:
    """Lend one engine or two for a while, again and again. `seen`: the version at the start and the end of each loan
    that an engine has lived through."""
    while True:
        await asyncio.sleep(random.expovariate(1 / 3.0))
        serving = [name for name, _ in fleet.role("rollout")]
        taken = await loans.take(random.sample(serving, min(len(serving) - 1, random.randint(1, 2))))
        versions = {name: await handle.actor.engine.version() for name, handle in taken}
        lent = await loans.drain(taken)
        await asyncio.sleep(random.uniform(0.0, 20.0))
        seen += [(name, versions[name], await handle.actor.engine.version()) for name, handle in lent]
        assert all(handle.is_dead or not handle.actor.engine.sampled().num_in_flight for _, handle in lent)
        await loans.give_back(lent)


async def kill(fleet: ScriptedFleet, random: Random) -> None:
    while True:
        await asyncio.sleep(random.expovariate(1 / 15.0))
        fleet.strike(random.choice([name for name, _ in [*fleet.role("rollout"), *fleet.lent()]] or ["nobody"]))


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(6)))
def test_engines_that_finish_first_load_without_a_sequence_and_one_by_one(
    max_staleness: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, random = config_of(tmp_path, "rollout.on_update=finish", f"max_staleness={max_staleness}"), Random(seed)
    fleets, seen, load = list[ScriptedFleet](), list[int](), ScriptedEngine.load

    async def checked(engine: ScriptedEngine, publication: Publication) -> None:
        assert engine.sampled().num_in_flight == 0
        seen.append(len(fleets[0].role("rollout")))
        await load(engine, publication)

    async def main() -> dict[str, float]:
        flow = flow_of(config)
        fleets.append(ScriptedFleet(store_of(config, flow), config, flow, random))
        directory = RunDirectory.create(config)
        killing = asyncio.ensure_future(kill(fleets[0], random) if seed % 2 else asyncio.sleep(1e9))
        await asyncio.wait_for(controller_over(fleets[0], config, directory).run(), 1e6)
        killing.cancel()
        directory.close()
        return await fleets[0].store.stats()

    monkeypatch.setattr(ScriptedEngine, "load", checked)
    numbers = run_virtually(main())
    assert numbers["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
    assert max(line.get("staleness/max", 0) for line in metrics_of(tmp_path / "run")) <= max_staleness
    assert len(seen) >= 3 * NUM_STEPS
    if not seed % 2:  # without deaths three of the four engines work on
        assert set(seen) == {3}


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(6)))
def test_whoever_is_lent_or_dies_each_row_is_trained_once_within_its_bound(
    max_staleness: int, seed: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"max_staleness={max_staleness}")
    random, seen = Random(seed), list[tuple[str, int, int]]()

    async def main() -> dict[str, float]:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, random)
        directory = RunDirectory.create(config)
        controller = controller_over(fleet, config, directory)
        others = [asyncio.ensure_future(lend(fleet, controller.loans, random, seen))]
        if seed % 2:
            others.append(asyncio.ensure_future(kill(fleet, random)))
        await asyncio.wait_for(controller.run(), 1e6)
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
        directory.close()
        check_invariants(fleet.store.ledger)
        return await fleet.store.stats()

    numbers = run_virtually(main())
    assert numbers["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
    assert not any(value for name, value in numbers.items() if name.startswith("dropped/"))
    lines = metrics_of(tmp_path / "run")
    assert max(line.get("staleness/max", 0) for line in lines) <= max_staleness
    assert len(seen) >= 4
    assert all(before == after for _, before, after in seen)
    kinds = {event["kind"] for event in RunDirectory.open(tmp_path / "run").read_events()} - {"hint", "warning"}
    assert kinds == ({"fault", "recovered"} if seed % 2 else set())
