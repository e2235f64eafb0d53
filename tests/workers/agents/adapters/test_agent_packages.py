"""Agents written with pydantic-ai, smolagents and openai-agents, as their documentation has them, as commands. The
packages lie in an environment of their own: .venv-agents."""

import asyncio
from pathlib import Path

import pytest

from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter
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
