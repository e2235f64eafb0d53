"""Agents as people write them with the clients of OpenAI and Anthropic, and nothing of Penstock's in them: what they
are given is an address and a key."""

import asyncio
from pathlib import Path

import pytest

from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.trajectory import COMPLETED, Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter
from tests.workers.agents.played import ScriptedEngines, make_runner

CHAT = """
import json

from openai import OpenAI

TOOLS = [{
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}]


def solve(question, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    completion = client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
    for call in completion.choices[0].message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append(completion.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] * arguments["b"])})
    completion = client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
    return completion.choices[0].message.content
"""
RESPONSES = """
import json

from openai import OpenAI

tools = [{
    "type": "function",
    "name": "multiply",
    "description": "The product of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}]


def solve(question, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    input_list = [{"role": "user", "content": question}]
    response = client.responses.create(model="gpt-5", tools=tools, input=input_list)
    input_list += response.output
    for item in response.output:
        if item.type == "function_call":
            arguments = json.loads(item.arguments)
            product = arguments["a"] * arguments["b"]
            input_list.append({"type": "function_call_output", "call_id": item.call_id, "output": str(product)})
    return client.responses.create(model="gpt-5", tools=tools, input=input_list).output_text
"""
MESSAGES = """
from anthropic import Anthropic

tools = [{
    "name": "multiply",
    "description": "The product of two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}]


def solve(question, base_url, api_key):
    client = Anthropic(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    message = client.messages.create(model="claude", max_tokens=1024, tools=tools, messages=messages)
    assert message.stop_reason == "tool_use"
    tool_use = next(block for block in message.content if block.type == "tool_use")
    result = str(tool_use.input["a"] * tool_use.input["b"])
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": tool_use.id, "content": result}]},
    ]
    assert client.messages.count_tokens(model="claude", tools=tools, messages=messages).input_tokens > 0
    with client.messages.stream(model="claude", max_tokens=1024, tools=tools, messages=messages) as stream:
        return "".join(stream.text_stream)
"""
RUNNER = """
from anthropic import AsyncAnthropic, beta_async_tool


@beta_async_tool
async def multiply(a: int, b: int) -> str:
    \"\"\"The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    return str(a * b)


async def solve(question, base_url, api_key):
    async with AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        runner = client.beta.messages.tool_runner(
            model="claude", max_tokens=1024, tools=[multiply], messages=[{"role": "user", "content": question}]
        )
        message = await runner.until_done()
        return message.content[0].text
"""


def policy(prompt: str, sampling: Sampling) -> str:
    """Calls the tool, and then says what it has returned."""
    return "42" if "42" in prompt else "[multiply(a=6, b=7)]"


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for the rest of the world, where nobody listens."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "hub.example")


@pytest.mark.parametrize("text", [CHAT, RESPONSES, MESSAGES, RUNNER], ids=["chat", "responses", "messages", "runner"])
def test_an_example_of_the_client_works_with_what_an_agent_is_given(text: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(text)

    async def attempt() -> Trajectory:
        keys = AttemptKeys()
        environment = adapter("agent", function=f"{tmp_path}/agent.py:solve")
        runner = make_runner(environment, ScriptedEngines(policy), keys=keys)
        server = HttpServer(keys)
        keys.base_url = await server.start("127.0.0.1", 0)
        try:
            return await runner.attempt(Task("0", 0, {"question": "6 * 7?", "answer": "42"}), Sampling(max_tokens=40))
        finally:
            await server.stop()

    found = asyncio.run(attempt())
    assert (found.outcome.detail, found.outcome.kind, found.reward) == ("", COMPLETED, 1.0)
    assert [len(turn.calls) for turn in found.turns] == [1, 0]
    assert found.turns[1].parent == 0
