"""Real runs whose actors are killed: they end with the weights of a run in which nothing died, bit for bit."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.orchestrator.run import run
from tests.model_files import load_model
from tests.run_files import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 5


@pytest.fixture(scope="module")
def words(small_run: list[str], cluster: Any) -> list[str]:
    return [
        *small_run, "rollout.num_threads=1", "trainer.num_threads=1", "rollout.engine=hf", f"trainer.max_steps={STEPS}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    return run(load_config([*words, f"output_dir={output}", "name=run"]), quiet=True).directory


class Killer(threading.Thread):
    """Ends the process of an actor by SIGKILL once the run has taken a step, or stops it."""

    def __init__(self, directory: Path, name: str, after_step: int, by: signal.Signals) -> None:
        super().__init__(daemon=True)
        self._by = by
        self._directory, self._name, self._after_step = directory, name, after_step
        self.killed = False

    def run(self) -> None:
        deadline = time.monotonic() + 120
        metrics = self._directory / "metrics.jsonl"
        while time.monotonic() < deadline and not self.killed:
            time.sleep(0.01)
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= self._after_step:
                namespace = json.loads((self._directory / "cluster.json").read_text())["namespace"]
                actor = ray.get_actor(self._actor(namespace), namespace=namespace)
                if self._name in ("Store", "Agent"):
                    ray.kill(actor)
                else:
                    pid = ray.get(actor.process.remote(str(self._directory)), timeout=60).pid
                    os.kill(pid, self._by)
                self.killed = True

    def _actor(self, namespace: str) -> str:
        """An agent has its node's address in its name."""
        names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]
        return next(name for name in names if name == self._name or name.startswith(f"{self._name}-"))


@pytest.fixture
def disturbed(words: list[str], tmp_path: Path) -> Callable[..., Path]:
    def go(name: str, *more: str, after_step: int = 2, by: signal.Signals = signal.SIGKILL) -> Path:
        killer = Killer(tmp_path / "run", name, after_step, by)
        killer.start()
        result = run(load_config([*words, f"output_dir={tmp_path}", "name=run", *more]), quiet=True)
        killer.join(10)
        assert killer.killed
        return result.directory

    return go


def kinds_of(directory: Path) -> list[str]:
    return [event["kind"] for event in RunDirectory.open(directory).read_events()]


def assert_same_model(one: Path, other: Path) -> None:
    expected, found = (load_model(directory / "model") for directory in (one, other))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize("name", ["Rollout-0", "Reward-0", "Compute-group_advantage", "Prompts", "Trainer-policy-0"])
def test_what_is_replaced_changes_no_bit(name: str, disturbed: Callable[..., Path], undisturbed: Path) -> None:
    directory = disturbed(name)
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, undisturbed)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == 1
    assert "returned" not in kinds
    last = metrics_of(directory)[-1]
    assert last[f"faults/{name.partition('-')[0].lower()}"] == 1
    assert last["faults/lost_s"] > 0


@pytest.mark.parametrize(
    ("name", "more"),
    [("Scorer-reference-0", "algorithm.kl_coef=0.05"), ("Trainer-policy-1", "trainer.num_ranks=2")],
)
def test_a_gang_is_replaced_as_one(
    name: str, more: str, words: list[str], disturbed: Callable[..., Path], tmp_path: Path
) -> None:
    whole = run(load_config([*words, more, f"output_dir={tmp_path}", "name=whole"]), quiet=True).directory
    directory = disturbed(name, more)
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, whole)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == 1


def test_a_member_that_hangs_is_found_and_ended_and_its_stacks_are_kept(
    disturbed: Callable[..., Path], undisturbed: Path
) -> None:
    quick = ["faults.heartbeat_s=0.5", "faults.heartbeat_timeout_s=10"]
    directory = disturbed("Rollout-0", *quick, by=signal.SIGSTOP)
    assert_same_model(directory, undisturbed)
    events = RunDirectory.open(directory).read_events()
    ended = next(event for event in events if event["kind"] == "ended" and event["member"] == "Rollout-0")
    assert ended["state"] == "silent"
    assert "Rollout-0" in (directory / ended["stacks"]).read_text()
    assert {"fault", "recovered"} <= {event["kind"] for event in events}


@pytest.mark.parametrize("name", ["Store", "Agent"])
def test_what_cannot_be_replaced_alone_costs_the_steps_since_the_checkpoint(
    name: str, disturbed: Callable[..., Path], undisturbed: Path
) -> None:
    directory = disturbed(name, "checkpoint.every_steps=1")
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, undisturbed)
    assert kinds_of(directory).count("returned") == 1
