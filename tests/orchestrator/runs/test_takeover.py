"""Commands that are killed, and others that go on with their actors: nothing starts again, no step is lost, and the
weights are those of a run in which nothing happened."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from tests.chaos.checker import Promises, broken
from tests.model_files import load_model
from tests.orchestrator.victim import Victim
from tests.run_files import events_of, metrics_of

pytestmark = pytest.mark.real

STEPS, NUM_KILLS = 12, 3
ENVIRONMENT_STEPS = 8
"""Steps of runs in an environment, which take longer."""
GAME, DUEL = (Path(__file__).with_name(name) for name in ("digits_game.py", "duel.py"))
POLICIES = ("solver", "proposer")
SETTINGS = [
    "rollout.engine=hf", "rollout.num_workers=2", "rollout.num_threads=1", "trainer.num_threads=1", "resume=auto",
    f"trainer.max_steps={STEPS}", "tracking.samples_every_steps=1", "checkpoint.every_steps=0",
    "faults.pause_s=0.1",
]  # fmt: skip


class Run:
    """One run, by any number of commands."""

    def __init__(self, start: Callable[[list[str]], Victim], words: list[str], directory: Path) -> None:
        self._start, self.directory = start, directory
        self.words = [*words, f"output_dir={directory.parent}", f"name={directory.name}"]

    def begin(self, *more: str) -> Victim:
        return self._start([*self.words, *more])

    def kill_after(self, num_steps: int, delay_s: float = 0.0, *more: str) -> None:
        """A command that is killed once so many more steps are written."""
        victim, wanted = self.begin(*more), self.num_steps + num_steps
        victim.wait_until(lambda: self.num_steps >= wanted)
        time.sleep(delay_s)
        assert victim.process.poll() is None, victim.process.communicate()[0][-3000:]
        victim.kill()

    @property
    def num_steps(self) -> int:
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in events_of(self.directory)]

    @property
    def namespace(self) -> str:
        return str(json.loads((self.directory / "cluster.json").read_text())["namespace"])

    def actor(self, name: str) -> Any:
        return ray.get_actor(name, namespace=self.namespace)


@pytest.fixture(scope="module")
def start(
    warm_python: list[str], driver_environment: dict[str, str], cluster: str
) -> Iterator[Callable[[list[str]], Victim]]:
    started: list[Victim] = []

    def one(words: list[str]) -> Victim:
        started.append(Victim(words, warm_python, driver_environment))
        return started[-1]

    yield one
    for victim in started:
        victim.process.kill()


@pytest.fixture
def new_run(start: Callable[[list[str]], Victim], small_run: list[str], tmp_path: Path) -> Callable[..., Run]:
    return lambda name, *more: Run(start, [*small_run, *SETTINGS, *more], tmp_path / name)


@pytest.fixture(scope="module")
def whole(start: Callable[[list[str]], Victim], small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run to which nothing happened."""
    run = Run(start, [*small_run, *SETTINGS], tmp_path_factory.mktemp("undisturbed") / "whole")
    run.begin().finish()
    return run


def assert_same_model(one: Run, other: Run, folder: str = "model") -> None:
    expected, found = (load_model(run.directory / folder) for run in (one, other))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


def whole_and_killed(new_run: Callable[..., Run], words: list[str], lost: tuple[str, ...]) -> tuple[Run, Run]:
    """A run to which nothing happened, and one whose command was killed twice, the second time with these actors."""
    whole, killed = new_run("whole", *words), new_run("killed", *words)
    whole.begin().finish()
    killed.kill_after(2, 0.1)
    killed.kill_after(2, 0.3)
    for name in lost:
        ray.kill(killed.actor(name))
    killed.begin().finish()
    assert killed.kinds.count("placed") == 1
    assert killed.kinds.count("taken_over") == 2
    return whole, killed


def broken_promises(run: Run, max_staleness: int = 0, num_steps: int = STEPS, group_size: int = 4) -> list[str]:
    return broken(run.directory, Promises(num_steps, 4, group_size, max_staleness, {}, 0.0), [])


@pytest.mark.promise("4 taken over", "The run dies")
def test_commands_killed_at_random_moments_cost_no_step_and_change_no_bit(
    new_run: Callable[..., Run], whole: Run
) -> None:
    killed, random = new_run("killed"), Random(3)
    for _ in range(NUM_KILLS):
        killed.kill_after(1, random.uniform(0.0, 0.5))
    killed.begin().finish()
    assert not broken_promises(killed)
    assert killed.kinds.count("placed") == 1  # nobody was started again
    assert killed.kinds.count("taken_over") == NUM_KILLS
    assert not {"fault", "returned", "resume"}.intersection(killed.kinds)
    epochs = [event["epoch"] for event in events_of(killed.directory) if event["kind"] == "taken_over"]
    assert epochs == list(range(2, 2 + NUM_KILLS))
    assert_same_model(whole, killed)


def test_attempts_in_an_environment_go_on_while_nobody_drives_the_run(new_run: Callable[..., Run]) -> None:
    """The environment and an engine that die meanwhile are replaced by the next command."""
    words = [f"environment.name={GAME}:Digits", "data.source=environment", "data.path=null"]
    words.append(f"trainer.max_steps={ENVIRONMENT_STEPS}")
    whole, killed = whole_and_killed(new_run, words, ("Environment-0", "Rollout-1"))
    recovered = [event["member"] for event in events_of(killed.directory) if event["kind"] == "recovered"]
    assert sorted(recovered) == ["Environment-0", "Rollout-1"]
    assert not broken_promises(killed, num_steps=ENVIRONMENT_STEPS)
    assert_same_model(whole, killed)


@pytest.mark.parametrize(
    "kind", [("trainer.lora.rank=8", "trainer.lora.publish=adapter"), ()], ids=["adapters", "models"]
)
def test_two_policies_go_on_with_the_next_command(new_run: Callable[..., Run], kind: tuple[str, ...]) -> None:
    """Their ranks and an engine die with the second one."""
    words = [
        f"algorithm={DUEL}:two_policies", f"environment.name={DUEL}:Duel", "data.source=environment", "data.path=null",
        f"trainer.max_steps={ENVIRONMENT_STEPS}", *kind,
    ]  # fmt: skip
    whole, killed = whole_and_killed(new_run, words, ("Trainer-policies-0", "Rollout-1"))
    assert not broken_promises(killed, num_steps=ENVIRONMENT_STEPS, group_size=2 * 4)
    for policy in POLICIES:
        assert_same_model(whole, killed, f"model/{policy}")


def test_actors_that_die_with_the_command_are_replaced_by_the_next_one(new_run: Callable[..., Run], whole: Run) -> None:
    """Ranks, too: from the copies of their state."""
    killed = new_run("killed")
    for name in ("Trainer-policy-0", "Rollout-1"):
        killed.kill_after(2)
        ray.kill(killed.actor(name))
    killed.begin().finish()
    lost = [(event["kind"], event["member"]) for event in events_of(killed.directory) if "member" in event]
    assert ("recovered", "Trainer-policy-0") in lost
    assert ("recovered", "Rollout-1") in lost
    assert not broken_promises(killed)
    assert_same_model(whole, killed)


def test_asynchronous_runs_of_several_ranks_are_taken_over_within_their_bound(new_run: Callable[..., Run]) -> None:
    run = new_run("ahead", "max_staleness=2", "trainer.num_ranks=2", "checkpoint.every_steps=2")
    run.kill_after(3, 0.2)
    run.kill_after(1, 0.1)
    run.begin().finish()
    assert run.kinds.count("taken_over") == 2
    assert not broken_promises(run, max_staleness=2)
    assert (run.directory / "checkpoints" / f"global_step_{STEPS}" / "COMPLETE").exists()


def test_actors_of_other_settings_are_not_gone_on_with(new_run: Callable[..., Run]) -> None:
    run = new_run("changed", "checkpoint.every_steps=1")
    run.kill_after(3)
    before = run.namespace
    said = run.begin("trainer.optimizer.lr=0.002").finish()
    assert "changed: its actors are there, but not the same as now: trainer.optimizer.lr. They end" in " ".join(
        said.split()
    )
    assert "taken_over" not in run.kinds
    assert "resume" in run.kinds
    assert not [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == before]
    assert [line["step"] for line in metrics_of(run.directory)] == list(range(1, STEPS + 1))


def test_actors_end_when_nobody_comes_for_them(new_run: Callable[..., Run]) -> None:
    run = new_run("left", "faults.lease_s=2", "checkpoint.every_steps=1")
    run.kill_after(2)
    deadline, namespace = time.monotonic() + 300, run.namespace
    while [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.begin().finish()
    assert "resume" in run.kinds
    assert "taken_over" not in run.kinds


def test_a_command_that_was_thought_dead_ends_when_it_comes_back(new_run: Callable[..., Run], whole: Run) -> None:
    """The command was stopped, and the lock of its directory was lost with a file system."""
    run = new_run("run")
    stopped = run.begin()
    stopped.wait_until(lambda: run.num_steps >= 3)
    stopped.process.send_signal(signal.SIGSTOP)
    (run.directory / "run.lock").unlink()
    successor = run.begin()
    successor.wait_until(lambda: run.num_steps >= 6)
    stopped.process.send_signal(signal.SIGCONT)
    output, _ = stopped.process.communicate(timeout=900)
    assert stopped.process.returncode == 2, output
    assert "Another process has taken this run over" in " ".join(output.split())
    successor.finish()
    assert not broken_promises(run)
    assert_same_model(whole, run)
