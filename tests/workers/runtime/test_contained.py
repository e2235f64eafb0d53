"""Whose time passes while users' code runs. That it ends nothing but itself is tested where it runs.

That a time is over is shown by another one of the same length, which has begun later and is.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.workers.runtime.async_tasks import UserCodeTimeout, run_contained, time_limit_paused

TIME_S = 0.5


async def hangs() -> None:
    await asyncio.Event().wait()


async def until_over() -> None:
    """Whatever has as much time, and has begun before this, would be over too."""
    with pytest.raises(UserCodeTimeout):
        await run_contained(hangs(), TIME_S)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def test_a_wait_for_what_others_have_is_in_nobodys_own_time() -> None:
    async def scenario() -> None:
        free = asyncio.Event()

        async def waits() -> str:
            with time_limit_paused():
                await free.wait()
            return "served"

        async def calls() -> str:
            return await run_contained(waits(), TIME_S)

        both = asyncio.ensure_future(run_contained(calls(), TIME_S))
        await until_over()
        free.set()
        assert await both == "served"

    run(scenario)


def test_waits_that_overlap_end_with_the_last() -> None:
    async def scenario() -> None:
        first, last = asyncio.Event(), asyncio.Event()

        async def waits(free: asyncio.Event) -> None:
            with time_limit_paused():
                await free.wait()

        async def both_wait() -> None:
            await asyncio.gather(waits(first), waits(last))

        both = asyncio.ensure_future(run_contained(both_wait(), TIME_S))
        await until_over()
        first.set()
        await until_over()
        last.set()
        await both

    run(scenario)


def test_after_a_wait_there_is_as_much_time_as_was_left() -> None:
    async def scenario() -> None:
        async def waits_then_hangs() -> None:
            with time_limit_paused():
                await asyncio.sleep(0)
            await hangs()

        with pytest.raises(UserCodeTimeout, match=r"longer than 0\.5 s"):
            await run_contained(waits_then_hangs(), TIME_S)

    run(scenario)


def test_waits_of_others_are_in_ones_own_time() -> None:
    async def scenario() -> None:
        async def waits() -> None:
            with time_limit_paused():
                await hangs()

        other = asyncio.ensure_future(run_contained(waits(), TIME_S))
        await asyncio.sleep(0)
        await until_over()
        assert not other.done()
        other.cancel()

    run(scenario)


def test_a_wait_on_another_loop_touches_no_time_of_this_one() -> None:
    """The tool is a plain function, in its own thread."""

    async def waits() -> str:
        with time_limit_paused():
            return "served"

    async def scenario() -> None:
        assert await run_contained(asyncio.to_thread(lambda: asyncio.run(waits())), 60.0) == "served"

    run(scenario)
