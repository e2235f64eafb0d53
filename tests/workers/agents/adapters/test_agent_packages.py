"""Agents written with pydantic-ai, smolagents and openai-agents, as their documentation has them, as commands; and
mini-swe-agent's own command in a workspace. The packages lie in an environment of their own: .venv-agents."""

import asyncio
import json
from pathlib import Path

import pytest

from penstock.workers.agents.adapters.repository import Repository
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, Trajectory, segments_of
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter
from tests.workers.agents.adapters.test_repository import archive, pytest_options, task
from tests.workers.agents.played import ScriptedEngines, make_runner

pytestmark = pytest.mark.real

PYTHON = Path(__file__).parents[4] / ".venv-agents/bin/python"
PYDANTIC = """
import json
import sys

from pydantic_ai import Agent

agent = Agent("MODEL", instructions="Use the tool.")


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    \"\"\"The product of two numbers.\"\"\"
    return a * b


print(agent.run_sync(json.load(sys.stdin)["question"]).output)
"""
SMOLAGENTS = """
import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    \"\"\"The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    return a * b


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[multiply], model=model, verbosity_level=-1)
print(agent.run(json.load(sys.stdin)["question"]))
"""
OPENAI_AGENTS = """
import json
import sys

from agents import Agent, Runner, function_tool


@function_tool
def multiply(a: int, b: int) -> int:
    \"\"\"The product of two numbers.\"\"\"
    return a * b


agent = Agent(name="Calculator", instructions="Use the tool.", tools=[multiply])
print(Runner.run_sync(agent, json.load(sys.stdin)["question"]).final_output)
"""


def calls_then_says(prompt: str, sampling: Sampling) -> str:
    return "42" if "42" in prompt else "[multiply(a=6, b=7)]"


def calls_alone(prompt: str, sampling: Sampling) -> str:
    """smolagents takes nothing but calls, and its answer is one."""
    call = '"final_answer", "arguments": {"answer": "42"}' if "Observation:\n42" in prompt else (
        '"multiply", "arguments": {"a": 6, "b": 7}'
    )  # fmt: skip
    return f'<tool_call>\n{{"name": {call}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        (PYDANTIC.replace("MODEL", "openai-chat:gpt-5"), "pythonic"),
        (PYDANTIC.replace("MODEL", "openai-responses:gpt-5"), "pythonic"),
        (PYDANTIC.replace("MODEL", "anthropic:claude-sonnet-5"), "pythonic"),
        (SMOLAGENTS, "hermes"),
        (OPENAI_AGENTS, "pythonic"),
    ],
    ids=["pydantic-ai chat", "pydantic-ai responses", "pydantic-ai messages", "smolagents", "openai-agents"],
)
def test_an_agent_of_a_package_plays_an_attempt(text: str, tools: str, tmp_path: Path) -> None:
    assert PYTHON.exists(), "no environment with packages of agents: type `make .venv-agents/.locked`"
    (tmp_path / "agent.py").write_text(text)

    async def attempt() -> Trajectory:
        keys = AttemptKeys()
        env = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
        environment = adapter("agent", command=[str(PYTHON), f"{tmp_path}/agent.py"], env=env)
        engines = ScriptedEngines(calls_alone if tools == "hermes" else calls_then_says)
        runner = make_runner(
            environment, engines, max_model_len=20_000, keys=keys, tools=tools, timeout_s=600.0, max_tokens=1000
        )
        server = HttpServer(keys)
        keys.base_url = await server.start("127.0.0.1", 0)
        try:
            return await runner.attempt(Task("0", 0, {"question": "6 * 7?", "answer": "42"}), Sampling(max_tokens=400))
        finally:
            await server.stop()

    found = asyncio.run(attempt())
    assert (found.outcome.detail, found.outcome.kind, found.reward) == ("", COMPLETED, 1.0)
    assert [call.name for call in found.turns[0].calls] == ["multiply"]
    assert len(found.turns) == 2


def thinks_and_calls(name: str, **arguments: str) -> str:
    return f"A thought.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


MINI = (
    f"{PYTHON.parent}/mini --task {{problem_statement}} --yolo --exit-immediately --model openai/policy --cost-limit 0 "
    "--output /tmp/trajectory.json"
)
FOR_MINI = {
    "MSWEA_CONFIGURED": "1", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # fmt: skip


def test_mini_swe_agent_repairs_a_repository_behind_the_fence(tmp_path: Path) -> None:
    """Its loop, its prompts and its client are its own. It has no network but the way to the gateway."""
    assert PYTHON.exists(), "no environment with packages of agents: type `make .venv-agents/.locked`"
    archive(tmp_path)
    commands = [
        "hostname; pwd; python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80))'",
        "sed -i 's/a - b/a + b/' sums.py && python3 -c 'import sums; print(sums.add(2, 3))'",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    left = iter(commands)

    async def attempt() -> tuple[Trajectory, list[str]]:
        keys, options = AttemptKeys(), pytest_options()
        options["show"].append(str(PYTHON.parents[1]))
        environment = Repository(
            f"{tmp_path}/{{instance_id}}.tar.gz", agent=MINI, show=options["show"],
            variables={**options["variables"], **FOR_MINI},
        )  # fmt: skip
        engines = ScriptedEngines(lambda prompt, sampling: thinks_and_calls("bash", command=next(left)))
        runner = make_runner(
            environment, engines, max_model_len=20_000, keys=keys, tools="hermes", timeout_s=600.0, max_tokens=2000
        )
        server = HttpServer(keys)
        keys.base_url = await server.start("127.0.0.1", 0)
        try:
            found = await runner.attempt(task(), Sampling(max_tokens=400))
        finally:
            await runner.close()
            await server.stop()
        return found, [prompt for prompt, _ in engines.asked]

    found, prompts = asyncio.run(attempt())
    assert (found.outcome.detail, found.outcome.kind, found.reward) == ("", COMPLETED, 1.0)
    assert [[one.arguments["command"] for one in turn.calls] for turn in found.turns] == [[one] for one in commands]
    assert "Please solve this issue: add subtracts" in prompts[0]
    assert "sandbox\\n/testbed\\n" in prompts[1]
    assert "Network is unreachable" in prompts[1]
    assert len(segments_of(found.turns)) == 1, "its history is not continued as it was sampled"
    assert all(len(turn.logprobs) == len(turn.output_ids) > 30 for turn in found.turns)
    assert '"returncode": 0' in prompts[2]
    assert "5\\n" in prompts[2]
