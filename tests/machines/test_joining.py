"""A machine that joins while a run goes on gets an engine, and takes it along when it loses its power: the run goes on,
and ends with the bits of a run on one machine."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machines.cluster import ROOT, machines
from tests.machines.ray_nodes import RAY, SOON
from tests.model_files import load_model
from tests.run_files import metrics_of
from tests.warm_workers import EXECUTABLE

pytestmark = [pytest.mark.real, pytest.mark.machines]

STEPS = 24
REWARD = '''
import os, time


def digits(response, task, slow_while):
    """Slow while that file is there."""
    if os.path.exists(slow_while):
        time.sleep(0.06)
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0
'''


def wait_for(found: Callable[[], Any], run: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + 300
    while not (answer := found()):
        assert run.poll() is None, run.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def test_a_machine_that_joins_gets_an_engine_and_takes_it_along(
    warm_python: list[str], small_run: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    warm, folder = Path(warm_python[0]).parent, tmp_path_factory.mktemp("joining")
    slow_while, directory = folder / "slow", folder / "joined"
    (folder / "slow.py").write_text(REWARD)
    words = [
        *small_run, "rollout.engine=hf", "trainer.num_threads=1", "rollout.num_threads=1", "reward.cpus_per_worker=0",
        f"reward.function={folder}/slow.py:digits", f"reward.options={{slow_while: {slow_while}}}",
        f"trainer.max_steps={STEPS}", f"output_dir={folder}",
    ]  # fmt: skip

    def told(kind: str) -> list[dict[str, Any]]:
        lines = (directory / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def has_step(step: int) -> bool:
        metrics = directory / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= step

    with machines(2, keep=[warm, tmp_path_factory.getbasetemp()]) as cluster:
        head, late = cluster
        cluster.start_ray(num_cpus=2, num_nodes=1, warm=warm, environment=SOON)
        command = [*warm_python, "-m", "penstock.cli.main", "run", *words]
        head.run([*command, "name=alone"], cwd=ROOT, timeout_s=900)
        slow_while.touch()
        run = head.start(
            [*command, "name=joined", "rollout.num_workers=auto"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(lambda: has_step(1), run)
        joining = [
            warm / EXECUTABLE, *RAY, "start", "--address", head.environment["RAY_ADDRESS"], "--node-ip-address",
            late.address, "--num-cpus", "1", "--object-store-memory", str(2 * 10**8), "--disable-usage-stats",
        ]  # fmt: skip
        late.run(joining, cwd=ROOT, timeout_s=900)
        (joined,) = wait_for(lambda: told("joined"), run)
        assert (joined["member"], joined["node"]) == ("Rollout-1", "machine2")
        wait_for(lambda: has_step(joined["step"] + 2), run)
        late.cut()
        late.kill()
        (left,) = wait_for(lambda: told("left"), run)
        assert (left["member"], left["node"]) == ("Rollout-1", "machine2")
        slow_while.unlink()
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-3000:]
    assert not told("returning")
    lines = metrics_of(directory)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["rollout/groups/Rollout-1"] > 0
    expected, found = load_model(folder / "alone" / "model"), load_model(directory / "model")
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
