"""Open pages hear of each run that changes, and slow ones are not told everything."""

import asyncio
import itertools
import json
from typing import Any

import anyio

from penstock.ui.answers import ANEW, BEHIND, Live


async def heard(events: Any) -> Any:
    return json.loads((await asyncio.wait_for(anext(events), 5))["data"])


def line(run: str, step: int) -> dict[str, Any]:
    return {"id": run, "step": step}


def test_changes_of_runs_are_told_and_nothing_else() -> None:
    async def scenario() -> None:
        table = [line("a", 1), line("b", 1)]
        live = Live(0.01)

        async def look() -> list[dict[str, Any]]:
            return list(table)

        running = asyncio.create_task(live.run(look))
        events = live.events()
        assert await heard(events) == ANEW
        table[0] = line("a", 2)
        assert await heard(events) == {"runs": {"a": line("a", 2)}}
        table[1:] = [line("c", 0)]
        assert await heard(events) == {"runs": {"c": line("c", 0), "b": None}}
        running.cancel()

    asyncio.run(scenario())


def test_a_page_that_is_slow_is_told_to_ask_for_everything_anew() -> None:
    async def scenario() -> list[Any]:
        live, steps, enough = Live(0.0), itertools.count(), asyncio.Event()

        async def look() -> list[dict[str, Any]]:
            if (step := next(steps)) == 5 * BEHIND:
                enough.set()
            return [line("a", step)]

        looking = asyncio.create_task(live.run(look))
        events = live.events()
        assert await heard(events) == ANEW
        await enough.wait()
        looking.cancel()
        return [await heard(events) for _ in range(BEHIND + 1)]

    found = asyncio.run(scenario())
    assert found[-1] == ANEW
    assert ANEW not in found[:-1]


def test_a_stream_ends_with_the_server() -> None:
    async def scenario() -> list[Any]:
        live, ending = Live(0.01), anyio.Event()
        asyncio.get_running_loop().call_later(0.05, ending.set)
        return [event async for event in live.events(ending)]

    assert asyncio.run(asyncio.wait_for(scenario(), 10)) == []


def test_a_look_that_fails_ends_nothing() -> None:
    async def scenario() -> Any:
        live, failures = Live(0.01), iter([True, True])

        async def look() -> list[dict[str, Any]]:
            if next(failures, False):
                raise OSError("the disk is away")
            steps.append(len(steps))
            return [line("a", len(steps))]

        steps: list[int] = []
        running = asyncio.create_task(live.run(look))
        events = live.events()
        await heard(events)
        found = await heard(events)
        running.cancel()
        return found

    assert list(asyncio.run(scenario())["runs"]) == ["a"]
