"""A turn is worth nothing to who was withdrawn before it was used, however the two come together."""

import asyncio
from collections.abc import Callable

import pytest

from penstock.store.service.waiters import WaitQueue

TURNS = 10
"""Turns of the event loop: more than any of this takes."""


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


WAKES: dict[str, Callable[[WaitQueue], None]] = {"one": WaitQueue.wake_first, "all": WaitQueue.wake_all}


@pytest.mark.parametrize("who", WAKES)
def test_who_is_withdrawn_between_its_turn_and_its_task_tries_nothing(who: str) -> None:
    async def main() -> None:
        queue = WaitQueue(lambda: None)
        free: list[str] = []
        asking = {name: asyncio.ensure_future(queue.wait(lambda: free or None, name)) for name in ("gone", "next")}
        await turns()
        free.append("a group")
        WAKES[who](queue)
        assert queue.withdraw("gone") == 1
        queue.wake_first()
        await turns()
        assert asking["gone"].done()
        assert asking["gone"].result() is None
        assert not len(queue) or not asking["next"].done()
        queue.wake_first()
        await turns()
        assert asking["next"].result() == free

    asyncio.run(main())
