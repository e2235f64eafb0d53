"""Agents as functions and as programs: what they are told, what ends them, and how their answers are scored."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters import agent as adapter_module
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, FAILED, Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter, played
from tests.workers.agents.played import ScriptedEngines, make_runner

TASK = {"question": "6 * 7?", "answer": "42"}


class Speaks:
    """The agent after one turn of the policy, so that the attempt has something to train."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def run(self, task: Task, ctx: Any) -> None:
        await ctx.sample([{"role": "user", "content": "?"}])
        await self._environment.run(task, ctx)

    async def aclose(self) -> None:
        await self._environment.aclose()


def attempt(**options: Any) -> Trajectory:
    return played(Speaks(adapter("agent", **options)), TASK, ["yes"])[0]


def program(text: str, **options: Any) -> Trajectory:
    return attempt(command=[sys.executable, "-c", text], **options)


@pytest.mark.real
def test_a_program_reads_the_row_and_what_it_prints_is_its_answer() -> None:
    assert program("import json,sys; print(eval(json.load(sys.stdin)['question'].strip('?')))").reward == 1.0
    assert program("print(41)").reward == 0.0


@pytest.mark.real
def test_a_program_that_fails_is_told_with_the_end_of_its_output() -> None:
    outcome = program("import sys; print('x' * 10_000, file=sys.stderr); sys.exit('no such model')").outcome
    assert outcome.kind == FAILED
    assert "it has ended with 1; it said last: xxx" in outcome.detail
    assert outcome.detail.endswith("no such model")


@pytest.mark.real
def test_a_program_sees_the_endpoint_and_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_API_KEY", "for the agent")
    check = (
        "import os; assert 'WANDB_API_KEY' not in os.environ; assert os.environ['PATH'];"
        "assert os.environ['OPENAI_API_KEY'].startswith('ps-');"
        "assert '127.0.0.1' in os.environ['no_proxy'].split(',');"
        "print(42 if [os.environ.get(name) for name in ('SEARCH_API_KEY', 'MODE')] == EXPECTED else 0)"
    )
    assert program(check.replace("EXPECTED", "[None, None]")).reward == 1.0
    given = {"SEARCH_API_KEY": None, "MODE": "fast"}
    assert program(check.replace("EXPECTED", "['for the agent', 'fast']"), env=given).reward == 1.0


@pytest.mark.real
def test_an_endless_output_is_cut_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of it never lies in memory."""
    monkeypatch.setattr(adapter_module, "MAX_OUTPUT", 2)
    found = program("import sys\nsys.stdout.write('42')\nfor _ in range(1000): sys.stdout.write('x' * 2**20)")
    assert (found.outcome.kind, found.reward) == (COMPLETED, 1.0)


@pytest.mark.real
@pytest.mark.parametrize("session", [False, True])
def test_what_a_program_leaves_behind_does_not_hold_up_its_answer(session: bool, tmp_path: Path) -> None:
    left = f"subprocess.Popen(['sleep', '3600'], start_new_session={session})"
    assert program(f"import subprocess; {left}; print(42)").reward == 1.0


@pytest.mark.real
def test_a_program_need_not_read_its_row() -> None:
    large = {**TASK, "text": "x" * 2**20}
    found, _ = played(Speaks(adapter("agent", command=["echo", "42"])), large, ["yes"])
    assert found.reward == 1.0


@pytest.mark.real
def test_a_reward_blocks_nobody_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(
        "import os, sys\n"
        f"def pid(answer, task):\n    return float(answer == '42' and os.getpid() != {os.getpid()})\n"
        "def leaves(answer, task):\n    sys.exit(3)\n"
        "def own(response, task):\n    return 0.5\n"
        "async def soon(answer, task):\n    return 0.25\n"
    )
    name = f"{tmp_path}/grade.py"
    assert program("print(42)", reward=f"{name}:pid").reward == 1.0
    assert program("print(42)", reward=f"{name}:own").reward == 0.5
    assert program("print(42)", reward=f"{name}:soon").reward == 0.25
    assert program("print(42)", reward="math_verify").reward == 1.0
    failed = program("print(42)", reward=f"{name}:leaves").outcome
    assert failed.kind == FAILED
    assert "SystemExit: 3" in failed.detail


@pytest.mark.real
def test_a_function_may_answer_with_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "async def solve(question):\n    return {'value': 42}\n"
        "def grade(answer, task):\n    return float(answer['value'] == int(task['answer']))\n"
    )
    function, reward = (f"{tmp_path}/agent.py:{name}" for name in ("solve", "grade"))
    assert attempt(function=function, reward=reward).reward == 1.0


ASKS = """
import json, time, urllib.request

def solve(question, base_url, api_key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": question}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def waits(question):
    while True:
        time.sleep(0.01)

def leaves(question):
    raise SystemExit(3)
"""


def test_plain_functions_wait_for_their_answers_side_by_side_in_threads(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS)

    async def group() -> list[Trajectory]:
        keys, together = AttemptKeys(), asyncio.Barrier(3)

        class Engines(ScriptedEngines):
            async def sample(self, prompt_ids: Any, sampling: Sampling, conversation: object) -> Any:
                await together.wait()  # for the other attempts, which have to be under way
                return await super().sample(prompt_ids, sampling, conversation)

        environment = adapter("agent", function=f"{tmp_path}/agent.py:solve")
        runner = make_runner(environment, Engines(lambda prompt, sampling: "42"), keys=keys)
        server = HttpServer(keys)
        keys.base_url = await server.start("127.0.0.1", 0)
        try:
            return await runner.group(Task("0", 0, TASK), [Sampling(max_tokens=40)] * 3)
        finally:
            await server.stop()

    for found in asyncio.run(group()):
        assert (found.outcome.kind, found.reward, len(found.turns)) == (COMPLETED, 1.0, 1)


def test_a_plain_function_that_would_leave_the_process_has_failed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS)
    failed = attempt(function=f"{tmp_path}/agent.py:leaves").outcome
    assert (failed.kind, failed.detail) == (FAILED, "SystemExit: 3")


def test_a_plain_function_whose_attempt_is_over_is_asked_to_end(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS)
    environment = Speaks(adapter("agent", function=f"{tmp_path}/agent.py:waits"))
    found, _ = played(environment, TASK, ["yes"], timeout_s=1.0)
    assert found.outcome.reason == "time"
    deadline = time.monotonic() + 300
    while any(thread.name == "tool" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread goes on"
        time.sleep(0.01)


@pytest.mark.real
@pytest.mark.parametrize("own", [True, False])
def test_an_answer_may_be_of_a_class_of_the_agents_own_file(own: bool, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass\nclass Answer:\n    value: int\n\n"
        "async def solve(question):\n    return Answer(42)\n"
        "def grade(answer, task):\n    return float(isinstance(answer, Answer) and answer.value == 42)\n"
    )
    (tmp_path / "grade.py").write_text("def grade(answer, task):\n    return float(answer.value == 42)\n")
    reward = "agent.py" if own else "grade.py"
    found = attempt(function=f"{tmp_path}/agent.py:solve", reward=f"{tmp_path}/{reward}:grade")
    assert (found.outcome.detail, found.reward) == ("", 1.0)


def test_a_reward_that_fits_no_signature_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("def one(answer):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"environment\.options\.reward=.*\(answer, task\)"):
        adapter("agent", command=["echo"], reward=f"{tmp_path}/grade.py:one")


@pytest.mark.real
def test_an_attempt_that_ends_takes_its_program_along(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    text = f"import os,time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    environment = Speaks(adapter("agent", command=[sys.executable, "-c", text]))
    found, _ = played(environment, TASK, ["yes"], timeout_s=3.0)
    assert found.outcome.reason == "time"
    assert not file.exists() or not Path(f"/proc/{file.read_text()}").exists()
