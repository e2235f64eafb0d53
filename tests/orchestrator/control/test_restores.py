"""Asynchronous runs that die at random moments and go on, without processes: no finished work is thrown away.

Deaths come at any time, while a publication or a checkpoint is under way included. The store is strict: a group whose
tokens are too old ends the run instead of being evicted.
"""

import asyncio
from pathlib import Path
from random import Random

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.recovery.resume import open_run
from tests.orchestrator.scripted_fleet import ScriptedFleet, controller_over, flow_of, scripted_config, store_of
from tests.run_files import metrics_of
from tests.virtual_time import run_virtually

MAX_STEPS = 12


async def live(config: RunConfig, random: Random, tmp_path: Path) -> bool:
    """One process of the run, until its end or its death; whether it came to its end."""
    directory, resumed = open_run(config)
    flow = flow_of(config)
    store = store_of(config, flow, resumed.store if resumed is not None else None)
    fleet = ScriptedFleet(store, config, flow, random, resumed)
    running = asyncio.ensure_future(controller_over(fleet, config, directory).run())
    done, _ = await asyncio.wait({running}, timeout=random.uniform(5.0, 120.0))
    everybody = asyncio.all_tasks() - {asyncio.current_task()}
    for task in everybody:
        task.cancel()
    await asyncio.gather(*everybody, return_exceptions=True)
    directory.close()
    if done:
        running.result()
    return bool(done)


@pytest.mark.parametrize(("max_staleness", "seed"), [(1, 1), (1, 4), (2, 1), (2, 4), (0, 0)])
def test_no_finished_work_is_thrown_away_whenever_a_run_dies(max_staleness: int, seed: int, tmp_path: Path) -> None:
    words = [f"max_staleness={max_staleness}", "checkpoint.every_steps=2", f"trainer.max_steps={MAX_STEPS}"]
    config = scripted_config(tmp_path, *words, "rollout.num_workers=2", "trainer.num_ranks=2")
    random, lives = Random(seed), 0
    while not run_virtually(live(config, random, tmp_path)):
        lives += 1
        assert lives < 50
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, MAX_STEPS + 1))
    assert not any(line.get("dropped/stale") for line in lines)
    assert max(line["staleness/max"] for line in lines) <= max_staleness
