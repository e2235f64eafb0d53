"""Tools that do what tools do: raise, hang, flood, and take their time."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import ResourceError
from penstock.workers.agents.toolbox import python
from penstock.workers.protocols import Sampling
from penstock.workers.sandbox.execution import Limits, ProgramOutcome
from penstock.workers.sandbox.sandbox import Sandbox
from tests.workers.agents.played import TASK, Played, ScriptedEngines, make_runner, play


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
    sampling = Sampling(max_tokens=100, seed=5)
    limits = {"max_tokens": 400, "max_model_len": 4000}
    _, counts = play(Played(run), lambda prompt, _: next(answers), sampling=sampling, **limits, **settings)
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
        over.wait(900)
        return "late"

    began = time.monotonic()
    told, counts = called("[hangs(),add(1,1)]", [hangs, add], tool_timeout_s=0.3)
    over.set()
    assert told == "Error: hangs did not return within 0.3 s.\n2"
    assert counts["tools_timeout"] == 1
    assert time.monotonic() - began < 600


def test_tools_that_hang_for_good_take_no_thread_from_others() -> None:
    over = threading.Event()

    def hangs() -> str:
        over.wait(60)
        return "late"

    calls = ",".join(["hangs()"] * 5 + ["add(1,1)"])
    told, counts = called(f"[{calls}]", [hangs, add], tool_timeout_s=0.2, tool_threads=2)
    over.set()
    assert told.splitlines() == ["Error: hangs did not return within 0.2 s."] * 5 + ["2"]
    assert counts["tools_timeout"] == 5


class OneAtATime:
    """A sandbox with one worker, whose programs say how long they take."""

    limits = Limits()

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def run_python(self, source: str, wall_s: float) -> ProgramOutcome:
        async with self._free:
            takes_s = float(source)
            await asyncio.sleep(min(takes_s, wall_s))
        return ProgramOutcome("done", "", 0, takes_s, 0.1, "exited" if takes_s < wall_s else "timeout_wall")


def test_the_time_of_a_program_begins_when_a_sandbox_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = OneAtATime()
    monkeypatch.setattr("penstock.workers.agents.toolbox.sandbox_of", lambda limits: sandbox)
    calls = ",".join(["python(code='0.4')"] * 3)
    told, counts = called(f"[{calls}]", [python], tool_timeout_s=0.9)
    assert (told, counts["tools_timeout"]) == ("done\ndone\ndone", 0)
    told, counts = called("[python(code='60')]", [python], tool_timeout_s=0.2)
    assert (told, counts["tools_timeout"]) == ("Error: python did not return within 0.2 s.", 1)


def test_a_program_has_the_limits_of_the_environments_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Limits] = []

    def sandbox_of(limits: Limits) -> OneAtATime:
        asked.append(limits)
        return OneAtATime()

    monkeypatch.setattr("penstock.workers.agents.toolbox.sandbox_of", sandbox_of)
    assert called("[python(code='0')]", [python], sandbox=SandboxConfig(require_cgroup=True))[0] == "done"
    assert asked == [Limits(require_cgroup=True)]


@pytest.mark.real
def test_a_tool_around_the_sandbox_does_not_wait_for_it_in_its_own_time() -> None:
    """A tool that is called later, and hangs, is over while the first one still waits."""
    sandbox, waits = Sandbox(num_workers=1), asyncio.Event()

    async def computes(code: str) -> str:
        waits.set()
        return (await sandbox.run_python(code)).stdout

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def frees(ctx: Any) -> None:
        await sandbox.start()
        place = await sandbox.places.get()
        turn = await ctx.sample([{"role": "user", "content": "?"}], tools)
        toolbox = ctx.toolbox(tools)
        computing = asyncio.ensure_future(toolbox.call(turn.calls[0]))
        await waits.wait()
        told.append(await toolbox.call(turn.calls[1]))
        sandbox.places.put_nowait(place)
        told.append(await computing)

    told: list[str] = []
    tools = [computes, hangs]
    text = "[computes(code='print(6*7)'),hangs()]"
    sampling = Sampling(max_tokens=100)
    play(Played(frees), lambda prompt, _: text, sampling=sampling, tool_timeout_s=3, max_model_len=4000)
    sandbox.close()
    assert told == ["Error: hangs did not return within 3 s.", "42\n"]


def test_a_tools_time_begins_when_it_runs() -> None:
    """Three in one thread take three times as long as each."""
    begun = []

    def slow(a: int) -> int:
        begun.append(a)
        time.sleep(0.4)
        return a

    told, counts = called("[slow(1),slow(2),slow(3)]", [slow], tool_timeout_s=1.0, tool_threads=1)
    assert (told, begun, counts["tools_timeout"]) == ("1\n2\n3", [1, 2, 3], 0)


def test_a_tool_that_computes_for_ever_is_ended() -> None:
    ended = threading.Event()

    def spins() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    assert called("[spins()]", [spins], tool_timeout_s=0.2)[0] == "Error: spins did not return within 0.2 s."
    assert ended.wait(60)


def test_too_many_that_hang_end_the_run_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.agents.toolbox.MAX_LEFT", 2)
    over = threading.Event()

    def hangs() -> str:
        over.wait(60)
        return "late"

    with pytest.raises(ResourceError, match=r"calls of tools hang .* ctx\.sandbox"):
        called("[hangs(),hangs(),hangs()]", [hangs], tool_timeout_s=0.1, tool_threads=1)
    over.set()


@pytest.mark.parametrize("what", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration])
def test_a_tool_that_would_end_more_than_itself_is_told(what: type[BaseException]) -> None:
    def leaves(a: int) -> int:
        raise what("enough")

    async def leaves_soon(a: int) -> int:
        await asyncio.sleep(0)
        raise what("enough")

    told, counts = called("[leaves(1),leaves_soon(2)]", [leaves, leaves_soon])
    assert [what.__name__ in line for line in told.splitlines()] == [True, True]
    assert counts["tools_raised"] == 2


def test_an_async_tool_that_ignores_that_its_time_is_over_is_left_to_itself() -> None:
    async def deaf() -> None:
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    assert called("[deaf()]", [deaf], tool_timeout_s=0.1)[0] == "Error: deaf did not return within 0.1 s."


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


@pytest.mark.real
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
