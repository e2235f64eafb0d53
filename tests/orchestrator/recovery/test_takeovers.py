"""Runs whose controller dies again and again while everybody else lives on, without processes: at any moment another
goes on with them, and every row is trained once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.recovery.takeover import TakeoverPoint, settle_ranks
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.trainer.step_report import StepReport
from tests.amounts import amount
from tests.fakes.actors import FakeHandle
from tests.orchestrator.control.test_evaluations import Measured
from tests.orchestrator.scripted_fleet import (
    ScriptedFleet,
    controller_over,
    flow_of,
    scripted_config,
    store_of,
)
from tests.run_files import metrics_of
from tests.virtual_time import run_virtually

SEEDS = range(amount(3, many=50))
MAX_STEPS = 16
MAX_LIVES = 200
JOIN = "engines join"
"""Two of them, on nodes that may be lost, too."""


class Keeper(Owner):
    """Keeps what was noted last for the next controller, as an owner does."""

    noted: dict[int, Sequence[StepReport]]

    def __init__(self) -> None:
        self.noted = {}

    async def note(self, steps: Any) -> None:
        self.noted = dict(steps)
        await asyncio.sleep(0)


async def live(
    words: Sequence[str], random: Random, tmp_path: Path, strikes: Sequence[str], evaluator: Any = None
) -> int:
    """The run to its end; how many controllers it took."""
    config = scripted_config(tmp_path, *words)
    flow = flow_of(config)
    store = store_of(config, flow)
    fleet = ScriptedFleet(store, config, flow, random)
    fleet.owner = owner = Keeper()
    directory, lives, taken = RunDirectory.create(config), 0, None
    wanted = {"rollout": 4} if JOIN in strikes else {}
    while lives < MAX_LIVES:
        lives += 1
        more: Any = {"taken": taken, "wanted": wanted, "evaluator": evaluator}
        running = asyncio.ensure_future(controller_over(fleet, config, directory, **more).run())
        done, _ = await asyncio.wait({running}, timeout=random.uniform(0.0, 12.0))
        if done:
            running.result()
            break
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for name in strikes:
            if random.random() < 0.3:
                fleet.strike(name)
        for node in [node for node, _, agent in fleet.later_nodes if not agent.is_dead]:
            if random.random() < 0.3:
                fleet.power_off(node)
        await asyncio.sleep(random.uniform(0.0, 10.0))  # everybody works on
        taken = TakeoverPoint.of(await settle_ranks(fleet, owner.noted), owner.noted, directory.read_metrics())  # type: ignore[arg-type]
    directory.close()
    return lives


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("strikes", [[], ["Rollout-0", "Reward-0"], ["Trainer-1"], ["Rollout-1", JOIN]])
@pytest.mark.histories
@pytest.mark.parametrize("seed", SEEDS)
def test_another_controller_goes_on_at_any_moment_and_every_row_is_trained_once(
    max_staleness: int, strikes: list[str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHandle, "outlives_callers", True)
    words = [
        f"max_staleness={max_staleness}", f"trainer.max_steps={MAX_STEPS}", "checkpoint.every_steps=3",
        "rollout.num_workers=2", "trainer.num_ranks=2", "faults.store_snapshot_s=20", "faults.max_restarts=1000",
    ]  # fmt: skip
    lives = run_virtually(live(words, Random(seed), tmp_path, strikes))
    assert 2 < lives < MAX_LIVES
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, MAX_STEPS + 1))
    assert max(line["staleness/max"] for line in lines) <= max_staleness
    assert not any(line.get("dropped/stale") for line in lines)
    for line in lines:
        dropped = sum(value for name, value in line.items() if name.startswith("dropped/"))
        assert line["store/groups_admitted"] * 2 == line["store/rows_trained"] + dropped + line["store/rows"]
    assert lines[-1]["store/rows_trained"] == MAX_STEPS * 4 * 2


@pytest.mark.parametrize(("num_own", "strikes"), [(0, []), (0, ["Rollout-2"]), (1, ["Rollout-2"])])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(10, many=50)))
def test_another_controller_asks_lent_engines_again_about_their_own_version(
    num_own: int, strikes: list[str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHandle, "outlives_callers", True)
    words = [
        "max_staleness=2", f"trainer.max_steps={MAX_STEPS}", "checkpoint.every_steps=0", "evaluation.every_steps=3",
        f"rollout.num_workers={3 - num_own}", f"evaluation.num_workers={num_own}", "faults.store_snapshot_s=20",
        "faults.max_restarts=1000",
    ]  # fmt: skip
    lives = run_virtually(live(words, Random(seed), tmp_path, strikes, Measured(engine_s=3.0)))
    assert 2 < lives < MAX_LIVES
    lines = metrics_of(tmp_path / "run")
    measured = {line["step"]: line["accuracy/heldout"] for line in lines if "accuracy/heldout" in line}
    assert all(accuracy == step / 100 for step, accuracy in measured.items())
    events = RunDirectory.open(tmp_path / "run").read_events()  # none where nothing was lost
    lost = [event["step"] for event in events if event["kind"] == "evaluation_lost"]
    found = measured.keys() - {0, MAX_STEPS}
    assert sorted([*found, *lost]) == [3, 6, 9, 12, 15]
    assert len(lost) <= 2  # where two commands in a row died before nodes were to keep it
    assert max(line.get("staleness/max", 0) for line in lines) <= 2
    assert not any(line.get("dropped/stale") for line in lines)
