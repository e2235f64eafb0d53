"""Runs over machines whose clocks, links and lives are as they are: they end with the bits of a run on one machine."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.models.fresh import build_fresh_model
from tests.machines.cluster import ROOT, Cluster, machines
from tests.model_files import load_model
from tests.orchestrator.conftest import SMALL_MODEL
from tests.warm_workers import CLOCK_AHEAD_S

pytestmark = [pytest.mark.machines, pytest.mark.ray, pytest.mark.slow]

CPUS = 2
STEPS = 5
NOTICED = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "8",
}
"""Ray looks after its nodes more often than it does for users: one without power is gone after ten to twenty seconds,
and one whose cable is out for five is not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    lines = [json.dumps({"question": f"{i} and {i * i} are numbers", "answer": str(i)}) for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def cluster(warm_python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    warm = Path(warm_python[0]).parent
    with machines(3, keep=[warm, tmp_path_factory.getbasetemp()]) as cluster:
        cluster[3].environment[CLOCK_AHEAD_S] = "3600"
        cluster.start_ray(num_cpus=CPUS, warm=warm, environment=NOTICED)
        yield cluster


class Run:
    """`penstock run` on the first machine."""

    def __init__(self, cluster: Cluster, python: list[str], folder: Path, name: str, *words: str) -> None:
        self.directory = folder / name
        command = [
            *python, "-m", "penstock.orchestrator.cli", "run", f"model.path={folder}/model",
            f"data.path={folder}/prompts.jsonl", "rollout.max_model_len=64", "rollout.sampling.max_tokens=12",
            "reward.function=digits", "trainer.groups_per_step=4", "algorithm.group_size=4",
            "trainer.optimizer.lr=1e-3", "rollout.engine=hf", f"trainer.max_steps={STEPS}", "trainer.num_threads=1",
            "rollout.num_threads=1", "reward.cpus_per_worker=0", f"output_dir={folder}", f"name={name}", *words,
        ]  # fmt: skip
        self._process = cluster[1].start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for_step(self, step: int) -> None:
        deadline, metrics = time.monotonic() + 120, self.directory / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            assert time.monotonic() < deadline
            assert self._process.poll() is None, self._process.communicate()[0][-3000:]
            time.sleep(0.02)

    def finish(self) -> list[dict[str, Any]]:
        """Its events."""
        try:
            output, _ = self._process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            raise
        assert self._process.returncode == 0, output[-4000:]
        return [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]


def assert_same_bits(one: Path, other: Path) -> None:
    expected, found = (load_model(directory / "model") for directory in (one, other))
    assert expected.keys() == found.keys()
    assert all(bool((expected[name] == found[name]).all()) for name in expected)


@pytest.fixture
def start(cluster: Cluster, warm_python: list[str], folder: Path) -> Callable[..., Run]:
    return lambda name, *words: Run(cluster, warm_python, folder, name, *words)


def test_clocks_an_hour_apart_and_a_cable_that_is_out_for_seconds_and_a_machine_that_loses_its_power(
    cluster: Cluster, start: Callable[..., Run], folder: Path
) -> None:
    alone = start("alone", "cluster.nodes=[machine1]", "cluster.cpus_per_worker=0", "rollout.num_workers=2")
    alone.finish()
    words = ["rollout.num_workers=2", "store.inline_bytes=0", "checkpoint.every_steps=1"]
    spread = start("spread", *words)
    spread.wait_for_step(1)
    cluster[2].cut()
    time.sleep(5)
    cluster[2].mend()
    events = spread.finish()
    placed = next(event["actors"] for event in events if event["kind"] == "placed")
    assert {placed[name] for name in ("Trainer-policy-0", "Rollout-0", "Rollout-1")} == {
        "machine1", "machine2", "machine3",
    }  # fmt: skip
    assert not [event for event in events if event["kind"] in ("fault", "returned")]
    assert_same_bits(alone.directory, spread.directory)

    lost = start("lost", *words)
    lost.wait_for_step(2)
    cluster[3].cut()
    cluster[3].kill()
    events = lost.finish()
    assert [event["kind"] for event in events].count("returned") == 1
    last = [event["actors"] for event in events if event["kind"] == "placed"][-1]
    assert set(last.values()) == {"machine1", "machine2"}
    assert_same_bits(alone.directory, lost.directory)
