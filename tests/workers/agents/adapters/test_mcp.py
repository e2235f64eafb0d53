"""Tools of MCP servers, which die, hang and leave processes behind. Real servers over stdio."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters.mcp import McpCommand, McpServer, McpTool, with_unique_names
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, FAILED, TRUNCATED
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter, heard, played
from tests.workers.agents.played import ScriptedEngines, make_runner

HERE = Path(__file__).parent
ROW = {"prompt": "?", "answer": "4"}


def served(file: str, *args: str, **options: Any) -> Any:
    servers = {"notes": {"command": sys.executable, "args": [str(HERE / file), *args], "env": {"COLOUR": "blue"}}}
    return adapter("mcp", servers=servers, reward=None, **options)


def rough(*args: str, **options: Any) -> Any:
    return served("rough_server.py", *args, **options)


def are_gone(processes: str) -> bool:
    """Wait a moment for processes to be gone: one that is killed still has to die."""
    deadline = time.monotonic() + 300
    while any(map(is_alive, processes.split())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, processes.split()))


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.real
def test_a_servers_tools_are_the_models_and_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "x")
    calls = ["[keep('a')]", "[keep(note='b')]", "[divide(1,0)]", "[keep()]", "[picture()]",
             "[secret('COLOUR'),secret('PENSTOCK_KEY')]", "4"]  # fmt: skip
    attempt, counts = played(served("notes_server.py"), ROW, calls)
    first, second, by_zero, missing, picture, *variables = heard(attempt, "tool")
    assert (first, second) == ("a", "a,b")
    assert by_zero == "Error: McpFailed: Error executing tool divide"
    assert "note" in missing
    assert picture == "[image/png, 33 bytes that are no text]"
    assert variables == ["blue", "nothing"]
    assert (counts["tools"], counts["tools_raised"]) == (7, 2)


@pytest.mark.real
def test_its_state_is_the_attempts() -> None:
    environment = rough()
    for _ in range(2):
        attempt, _ = played(environment, ROW, ["[keep(note='a')]", "[keep(note='b')]", "4"])
        assert attempt.outcome.kind == COMPLETED
        assert heard(attempt, "tool") == ["a", "a,b"]


@pytest.mark.real
def test_a_message_without_end_ends_its_server() -> None:
    attempt, counts = played(rough(), ROW, ["[flood()]", "4"])
    assert "the MCP server notes: it has ended" in heard(attempt, "tool")[0]
    assert counts["mcp_died"] == 1


@pytest.mark.real
def test_a_server_that_dies_is_told_and_the_attempt_goes_on() -> None:
    attempt, counts = played(rough(), ROW, ["[die()]", "[keep(note='a')]", "4"])
    dying, dead = heard(attempt, "tool")
    assert "notes: it has ended with 3; it said last:" in dying
    assert "out of memory" in dying
    assert "it has ended with 3" in dead
    assert attempt.outcome.kind == COMPLETED
    assert (counts["mcp_died"], counts["tools_raised"]) == (1, 2)


@pytest.mark.real
def test_a_server_that_hangs_is_given_up_and_killed() -> None:
    attempt, counts = played(rough(), ROW, ["[child(),hang()]", "4"], tool_timeout_s=1.0)
    ids, late = heard(attempt, "tool")
    assert late == "Error: hang did not return within 1 s."
    assert counts["tools_timeout"] == 1
    assert attempt.outcome.kind == COMPLETED
    assert are_gone(ids)


@pytest.mark.real
def test_what_a_server_has_started_ends_with_the_attempt_though_it_dies_itself() -> None:
    attempt, _ = played(rough(), ROW, ["[child()]", "[die()]", "4"])
    assert are_gone(heard(attempt, "tool")[0])


@pytest.mark.real
def test_an_attempt_that_takes_too_long_leaves_no_server() -> None:
    answers = iter(["[child()]", "[hang()]"])
    engines = ScriptedEngines(lambda prompt, sampling: next(answers))
    runner = make_runner(rough(), engines, timeout_s=3.0, max_tokens=4000, max_model_len=4000)
    attempt = asyncio.run(runner.attempt(Task("0", 0, ROW), Sampling(max_tokens=40, seed=1)))
    assert (attempt.outcome.kind, attempt.outcome.reason) == (TRUNCATED, "time")
    assert are_gone(heard(attempt, "tool")[0])


@pytest.mark.real
@pytest.mark.parametrize(("behaviour", "said"), [("silent", "did not say within 1 s"), ("broken", "no such database")])
def test_a_server_that_does_not_start_fails_the_attempt_with_what_it_said(behaviour: str, said: str) -> None:
    attempt, counts = played(rough(behaviour, start_timeout_s=1.0 if behaviour == "silent" else 20.0), ROW, ["4"])
    assert attempt.outcome.kind == FAILED
    assert "the MCP server notes could not be started" in attempt.outcome.detail
    assert said in attempt.outcome.detail
    assert counts["mcp_not_started"] == 1


@pytest.mark.real
def test_a_shared_server_keeps_its_state_and_is_started_again_where_it_died() -> None:
    answers = iter(["[keep(note='a')]", "4", "[keep(note='b'),child()]", "[die()]", "4", "[keep(note='c')]", "4"])
    environment = rough(shared=True)
    runner = make_runner(
        environment, ScriptedEngines(lambda prompt, sampling: next(answers)), max_tokens=4000, max_model_len=4000
    )

    async def three() -> list[list[str]]:
        task, sampling = Task("0", 0, ROW), Sampling(max_tokens=40, seed=1)
        try:
            return [heard(await runner.attempt(task, sampling), "tool") for _ in range(3)]
        finally:
            await environment.aclose()

    first, second, third = asyncio.run(three())
    assert (first, second[0], third) == (["a"], "a,b", ["c"])
    assert are_gone(second[1])


def test_tools_of_the_same_name_have_their_servers() -> None:
    def tool(server: str, name: str) -> McpTool:
        return McpTool(McpServer(server, McpCommand("x"), 1), name, {"type": "function", "function": {"name": name}})

    found = with_unique_names([tool("a", "read"), tool("b", "read"), tool("b", "write"), tool("b", "add")], ["add"])
    assert [one.schema["function"]["name"] for one in found] == ["a_read", "b_read", "write", "b_add"]
    assert [one.name for one in found] == ["read", "read", "write", "add"]


def test_servers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"servers\.a\.command=no-such-program: there is no such program"):
        adapter("mcp", servers={"a": {"command": "no-such-program"}})
    with pytest.raises(ConfigError, match=r"servers\.a\.arg: .* did you mean 'args'"):
        adapter("mcp", servers={"a": {"command": "true", "arg": []}})
