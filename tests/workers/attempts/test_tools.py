"""Tools that do what tools do: raise, hang, flood, and take their time."""

import asyncio
import threading
import time
from typing import Any

from penstock.workers.protocols import Sampling
from tests.workers.attempts.played import TASK, Played, ScriptedEngines, make_runner, play


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


async def add_soon(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def called(text: str, tools: list[Any], **settings: Any) -> tuple[str, Any]:
    """What a model is told that has said `text` first."""
    found: list[Any] = []

    async def run(ctx: Any) -> None:
        messages = [{"role": "user", "content": "?"}]
        turn = await ctx.sample(messages, tools)
        found.extend(await ctx.use_tools(turn, tools))
        await ctx.sample([*messages, turn.message, *found], tools)

    answers = iter([text, "done"])
    _, counts = play(Played(run), lambda prompt, sampling: next(answers), max_tokens=400, **settings)
    return "\n".join(message["content"] for message in found), counts


def test_a_function_is_called_with_what_the_model_gave() -> None:
    assert called("[add(2,b=40)]", [add])[0] == "42"
    assert called("[add(2)]", [add])[0] == "3"
    assert called("[add_soon(2, 3)]", [add_soon])[0] == "5"


def test_calls_of_a_turn_are_answered_each() -> None:
    assert called("[add(1,1),add(2,2)]", [add])[0] == "2\n4"


def test_a_call_that_cannot_be_read_is_told_and_counted() -> None:
    told, counts = called("[add(1,]", [add])
    assert told.startswith("Error: The call is no Python")
    assert counts["calls_unreadable"] == 1


def test_a_tool_that_is_not_there_is_told_with_those_that_are() -> None:
    assert called("[sub(1,2)]", [add])[0] == "Error: There is no tool 'sub'. There are: add."


def test_arguments_that_do_not_fit_are_told() -> None:
    told, counts = called("[add('x')]", [add])
    assert "valid integer" in told
    assert called("[add(1,c=2)]", [add])[0].endswith("add has no parameter 'c'")
    assert counts["tools_raised"] == 1


def test_a_tool_that_raises_is_told() -> None:
    def fails(a: int) -> int:
        raise OSError("no such file")

    told, counts = called("[fails(1)]", [fails])
    assert told == "Error: OSError: no such file"
    assert counts["tools_raised"] == 1


def test_a_tool_that_hangs_is_given_up_and_blocks_nobody() -> None:
    over = threading.Event()

    def hangs() -> str:
        over.wait(20)
        return "late"

    began = time.monotonic()
    told, counts = called("[hangs(),add(1,1)]", [hangs, add], tool_timeout_s=0.3)
    over.set()
    assert told == "Error: hangs did not return within 0.3 s.\n2"
    assert counts["tools_timeout"] == 1
    assert time.monotonic() - began < 15


def test_a_megabyte_is_cut_and_bytes_become_text() -> None:
    def flood() -> str:
        return "x" * 1_000_000

    def raw() -> bytes:
        return b"caf\xe9 \xff"

    told, counts = called("[flood(),raw()]", [flood, raw], max_tool_characters=20)
    assert told.startswith("x" * 20 + "\n[999,980 more characters were cut]")
    assert told.endswith("caf\ufffd \ufffd")
    assert counts["tools_cut"] == 1


def test_what_is_no_text_is_json() -> None:
    def table() -> dict[str, Any]:
        return {"a": [1, None, True]}

    assert called("[table()]", [table])[0] == '{"a": [1, null, true]}'


def test_code_of_the_model_runs_in_the_sandbox() -> None:
    found: list[Any] = []

    async def run(ctx: Any) -> None:
        turn = await ctx.sample([{"role": "user", "content": "?"}])
        found.append(await ctx.sandbox().run_python(turn.text))
        assert ctx.sandbox() is ctx.sandbox()

    runner = make_runner(Played(run), ScriptedEngines(lambda prompt, sampling: "print(6*7)"))

    async def attempt() -> None:
        await runner.attempt(TASK, Sampling(max_tokens=40))
        await runner.close()

    asyncio.run(attempt())
    assert (found[0].stdout, found[0].reason) == ("42\n", "exited")


def test_other_tools_in_a_list_of_the_same_place_are_other_tools() -> None:
    def first() -> int:
        return 1

    def second() -> int:
        return 2

    names = []

    async def run(ctx: Any) -> None:
        for tool in (first, second) * 10:
            names.append(ctx.toolbox([tool]).descriptions[0]["function"]["name"])
        await ctx.sample([{"role": "user", "content": "?"}])

    play(Played(run), lambda prompt, sampling: "done")
    assert names == ["first", "second"] * 10


def test_an_environment_counts_for_the_metrics() -> None:
    async def run(ctx: Any) -> None:
        ctx.count("moves_invalid")
        ctx.count("moves_invalid", 2)
        await ctx.sample([{"role": "user", "content": "?"}])

    assert play(Played(run), lambda prompt, sampling: "done")[1]["moves_invalid"] == 3
