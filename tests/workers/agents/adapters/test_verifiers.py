"""Episodes of the real package, which lies in an environment of its own: .venv-verifiers."""

import asyncio
import itertools
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, FAILED, Trajectory
from penstock.workers.prompts.opening import EnvironmentTasks, open_held_out, open_rows
from penstock.workers.protocols import Sampling
from tests.warm_workers import EXECUTABLE, warm_python
from tests.workers.agents.adapters.adapted import adapter, heard
from tests.workers.agents.played import ScriptedEngines, make_runner

pytestmark = pytest.mark.real

PYTHON = Path(__file__).parents[4] / ".venv-verifiers/bin/python"
HERE = str(Path(__file__).with_name("verifiers_tasks"))
WARM = Path(f"/tmp/warm-{os.getpid()}-verifiers")
Play = Callable[[int], Any]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the package, which takes four seconds of CPU: all tests but the first start forks of a process that has
    done it."""
    assert PYTHON.exists(), "no environment with verifiers: type `make .venv-verifiers/.locked`"
    monkeypatch.setenv("PYTHONPATH", HERE)
    warm_python(WARM, os.getpid(), str(PYTHON), ["verifiers.v1", "verifiers.v1.utils.loaders"])


def sums(taskset: Mapping[str, Any] | None = None, python: Path = WARM / EXECUTABLE, **options: Any) -> Any:
    env = {
        "taskset": {"id": "sums_tasks", **(taskset or {})},
        "agent": {"harness": {"id": "sums_tasks"}, "runtime": {"type": "subprocess"}},
    }
    return adapter("verifiers", python=str(python), env=env, **options)


@asynccontextmanager
async def served(environment: Any, answer: Callable[[str], str], timeout_s: float = 120.0) -> AsyncIterator[Play]:
    engines = ScriptedEngines(lambda prompt, sampling: answer(prompt))
    keys = AttemptKeys()
    runner = make_runner(environment, engines, max_model_len=4000, keys=keys, timeout_s=timeout_s)
    server = HttpServer(keys)
    keys.base_url = await server.start("127.0.0.1", 0)
    try:
        yield lambda index: runner.attempt(Task(str(index), 0, {"index": index}), Sampling(max_tokens=40, seed=1))
    finally:
        await server.stop()
        await environment.aclose()


def adds(prompt: str) -> str:
    """The answer of "1+2?", which "Sure?" follows."""
    number = prompt.rpartition("+2?")[0].strip()[-1]
    return str(int(number) + 2)


def test_episodes_are_attempts_with_their_turns_and_their_rewards() -> None:
    async def play() -> list[Trajectory]:
        async with served(sums(python=PYTHON), lambda prompt: adds(prompt) if "1+2" in prompt else "no") as attempt:
            return await asyncio.gather(*(attempt(index) for index in (1, 0, 1)))

    attempts = asyncio.run(play())
    assert [(one.outcome.kind, one.outcome.detail, one.reward) for one in attempts] == [
        (COMPLETED, "", 1.0), (COMPLETED, "", 0.0), (COMPLETED, "", 1.0),
    ]  # fmt: skip
    assert [heard(one) for one in attempts] == [[f"{number}+2?", "Sure?"] for number in (1, 0, 1)]
    assert all([turn.parent for turn in one.turns] == [None, 0] for one in attempts)


def test_tasks_are_shuffled_and_each_is_there_once() -> None:
    found = list(sums().tasks(4))
    assert sorted(task.data["index"] for task in found) == [0, 1, 2]
    assert len({task.seed for task in found}) == 3


def many(kind: str) -> Any:
    return sums({"id": "many_tasks", "kind": kind})


def test_a_large_taskset_is_used_whole() -> None:
    rows = EnvironmentTasks(many("large").tasks(4), None, "verifiers")
    assert len(rows) == 12_000
    assert not rows.is_cut


def test_a_taskset_without_end_is_drawn_from_as_far_as_is_asked_for() -> None:
    found = [task.data["index"] for task in itertools.islice(many("endless").tasks(4), 12_000)]
    assert sorted(found) == list(range(12_000))
    assert found != sorted(found)
    assert EnvironmentTasks(many("endless").tasks(4), None, "verifiers").is_cut


def test_no_held_out_task_is_trained_on() -> None:
    """Both are drawn from the same tasks."""
    agent = "{harness: {id: sums_tasks}, runtime: {type: subprocess}}"
    options = f"{{python: {WARM / EXECUTABLE}, env: {{taskset: {{id: many_tasks, kind: large}}, agent: {agent}}}}}"
    words = ["environment.name=verifiers", "data.source=environment", f"environment.options={options}"]
    config = load_config([*words, "evaluation.every_steps=10", "evaluation.num_problems=300"])
    held_out, train = open_rows(config, held_out=True), open_rows(config)
    assert held_out is not None
    assert train is not None
    apart = open_held_out(config)
    assert apart.check(train, len(train)) == len(apart) == len(held_out) == 300


def test_what_an_episode_fails_with_is_told() -> None:
    async def play() -> Trajectory:
        async with served(sums(seat="judge"), adds) as attempt:
            return await attempt(0)

    outcome = asyncio.run(play()).outcome
    assert outcome.kind == FAILED
    assert "no seat 'judge'" in outcome.detail


def test_the_death_of_its_process_is_told_and_the_next_episode_has_another() -> None:
    environment = sums()

    def dies_once(prompt: str) -> str:
        if not killed:
            process = environment.episodes.process
            killed.append(process.pid)
            assert b"sums_tasks" not in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "everyone can read it there"
            os.killpg(killed[0], signal.SIGKILL)
            reader = select.poll()
            reader.register(process.stdin.fileno(), 0)
            assert [event for _, event in reader.poll(60_000)] == [select.POLLERR], (
                "the fork that lives as long as the process still reads what it is told"
            )
        return adds(prompt)

    async def play() -> tuple[Trajectory, Trajectory]:
        async with served(environment, dies_once) as attempt:
            return await attempt(0), await attempt(1)

    killed: list[int] = []
    lost, whole = asyncio.run(play())
    assert (lost.outcome.kind, whole.outcome.kind, whole.reward) == (FAILED, COMPLETED, 1.0)
    assert f"it has ended with -{int(signal.SIGKILL)}" in lost.outcome.detail


def test_an_episode_that_nobody_wants_any_more_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness says in a file what has become of it."""
    monkeypatch.setenv("SUMS_LOG", str(log := tmp_path / "log"))
    environment = sums()

    async def play() -> Trajectory:
        async with served(environment, adds) as attempt:
            await attempt(0)
            cut = asyncio.create_task(attempt(2))  # the third task sleeps
            while "asleep" not in (log.read_text() if log.exists() else ""):
                await asyncio.sleep(0.05)
            cut.cancel()
            await asyncio.wait([cut])
            return await attempt(1)

    assert asyncio.run(asyncio.wait_for(play(), 100)).reward == 1.0
    assert log.read_text().split() == ["asleep", "cancelled"]


def test_what_cannot_be_made_is_told_before_a_run() -> None:
    broken = adapter("verifiers", python=str(WARM / EXECUTABLE), env={"taskset": {"id": "no_such_taskset"}})
    with pytest.raises(ConfigError, match=r"verifiers cannot make this environment: [\s\S]*no_such_taskset"):
        next(broken.tasks(1))
    with pytest.raises(ConfigError, match=r"python=no-such-python: .* pip install verifiers"):
        adapter("verifiers", python="no-such-python", env={})
