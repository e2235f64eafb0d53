"""A process that an environment has started: how it ended is told, and its number is used only while it is its own."""

import asyncio
import os
import signal
import sys

import psutil
import pytest

from penstock.workers.agents.child_process import Child
from tests.processes import GONE_S, seen, wait_until_gone

pytestmark = pytest.mark.real


def test_what_it_leaves_is_killed_with_it_and_nobody_who_has_its_number_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killpg, killed = os.killpg, list[int]()

    def noted(group: int, number: int) -> None:
        killed.append(group)
        killpg(group, number)

    async def main() -> None:
        child = await Child.start(["sh", "-c", "sleep 600 & echo $!"])
        left = seen([int(await child.line())])
        await child.ended(GONE_S)
        assert child.exit_code == 0
        assert psutil.Process(child.process.pid).status() == psutil.STATUS_ZOMBIE, "its number is not free yet"
        assert left[0].is_alive
        await child.end()
        wait_until_gone(left)
        assert killed == [child.process.pid]
        child.kill_group()
        child.kill()
        await child.end()
        assert len(killed) == 1

    monkeypatch.setattr(os, "killpg", noted)
    asyncio.run(asyncio.wait_for(main(), 2 * GONE_S))


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)])
def test_its_exit_code_is_told_before_and_after_its_end(ending: str, code: int) -> None:
    async def main() -> None:
        child = await Child.start([sys.executable, "-c", f"import os, sys; print('?', file=sys.stderr); {ending}"])
        await child.ended(GONE_S)
        assert (child.has_ended, child.exit_code) == (True, code)
        await child.end()
        assert child.exit_code == code
        assert f"it has ended with {code}" in await child.ending()

    asyncio.run(asyncio.wait_for(main(), 2 * GONE_S))


def test_one_that_does_not_end_by_itself_is_killed() -> None:
    async def main() -> None:
        child = await Child.start(["sleep", "600"])
        running = seen([child.process.pid])
        assert child.exit_code is None
        await child.end()
        assert child.exit_code == -signal.SIGKILL
        wait_until_gone(running)

    asyncio.run(asyncio.wait_for(main(), 2 * GONE_S))
