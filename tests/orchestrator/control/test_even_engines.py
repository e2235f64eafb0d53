"""Several engines have equally much to do over a run, and in step at every step, whatever the lengths."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.orchestrator.scripted_fleet import ScriptedFleet, controller_over, flow_of, scripted_config, store_of
from tests.run_files import metrics_of
from tests.virtual_time import run_virtually

GROUPS = 8
MOST = 1.25
"""Groups of the busiest engine over those of the laziest."""


@pytest.mark.parametrize(
    ("max_staleness", "num_engines", "max_concurrent_samples", "num_steps"),
    [(0, 2, 256, 8), (0, 4, 8, 8), (2, 2, 256, 30), (2, 2, 8, 30), (2, 4, 256, 30), (2, 4, 8, 30)],
)
def test_the_busiest_engine_has_little_more_to_do_than_the_laziest(
    max_staleness: int, num_engines: int, max_concurrent_samples: int, num_steps: int, tmp_path: Path
) -> None:
    """Engines with room for all groups of a step, and for fewer."""
    config = scripted_config(
        tmp_path,
        f"max_staleness={max_staleness}",
        f"rollout.num_workers={num_engines}",
        f"rollout.max_concurrent_samples={max_concurrent_samples}",
        f"trainer.max_steps={num_steps}",
        f"trainer.groups_per_step={GROUPS}",
        "checkpoint.every_steps=0",
    )
    random = Random(max_staleness + num_engines)

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, random)
        directory = RunDirectory.create(config)
        await asyncio.wait_for(controller_over(fleet, config, directory).run(), 1e6)
        directory.close()

    run_virtually(main())
    lines = metrics_of(tmp_path / "run")
    steps = [[line[f"rollout/groups/Rollout-{index}"] for index in range(num_engines)] for line in lines]
    groups = steps[-1]
    assert sum(groups) >= num_steps * GROUPS
    assert lines[-1]["rollout/groups_spread"] == max(groups) / min(groups)
    assert lines[-1]["rollout/groups_spread"] <= MOST, groups
    if max_staleness == 0:
        assert steps == [[step * GROUPS / num_engines] * num_engines for step in range(1, num_steps + 1)]
