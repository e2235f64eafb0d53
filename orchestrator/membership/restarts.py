"""The restarts of a run that are under way, of its store, its ranks and its members, side by side.

    a caller notices a loss ──▶  a restart, a task of its own  ◀── others that notice it wait for it
                                  note ─▶ decide ─▶ pause ─▶ start ─▶ note        failed: decide again

A restart belongs to no caller: the deadline or the end of a caller does not end it. It ends when it is done or has
failed, when its member is to leave, or with the run. Each call within it has a deadline. A restart that meets another
loss waits for that one's restart:

    node ─▶ store ─▶ ranks ─▶ engines, and the others

What is to be done about a loss is decided in `recoveries.py`; what cannot be helped here is raised, and the run then
returns to its last checkpoint, or ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.metering.meters import Meters
from penstock.metering.table import RUN_LOST, RUN_REPLACED
from penstock.orchestrator.cluster.ray_calls import first_line, is_recoverable
from penstock.orchestrator.membership.recoveries import Recoveries
from penstock.orchestrator.membership.recovery import Restart
from penstock.orchestrator.run_directory.run_directory import RunDirectory


class Restarts:
    """Lifecycle: `run` for each loss, from any task; `left` for members that leave, `close` once nothing is to be
    served, `end` with the run."""

    def __init__(
        self,
        directory: RunDirectory,
        note: Callable[[str], None],
        recoveries: Recoveries,
        meters: Meters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note`: called with what people read. `meters`: those that count losses."""
        self.step = 0
        """The step that the run is at."""
        self._directory, self._note = directory, note
        self._recoveries, self._clock = recoveries, clock
        self._meters = meters or Meters()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Restarts under way, by title."""

    def is_under_way(self, title: str) -> bool:
        return title in self._tasks

    async def joined(self, title: str) -> bool:
        """Wait for the restart of this title that is under way, as `run` does. Returns whether there was one."""
        if (task := self._tasks.get(title)) is None:
            return False
        await asyncio.shield(task)
        return True

    async def run(self, title: str, restart: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the restart of this title is done: the one under way, or this one. Raises what it fails with, and
        `CancelledError` where it was cancelled."""
        if (task := self._tasks.get(title)) is None:
            task = self._tasks[title] = asyncio.create_task(restart(), name=f"restart of {title}")
            task.add_done_callback(lambda ended: self._remove(title, ended))
        await asyncio.shield(task)

    async def start_anew(
        self, role: str, title: str, failure: Exception, start: Callable[[], Awaitable[None]], tokens: int = 0
    ) -> None:
        """Start what takes the place of a lost member, as often as that is to be tried; within its restart. Raises the
        failure if it is not to be tried, or not any more. `tokens`: the number that were under way, and are made
        again."""
        began = self._clock()
        self._note_fault(role, title, failure)
        self._note(f"{title} is lost, another takes its place: {first_line(failure)}")
        decision = self._recoveries.lost(title, role, began, self.step)
        while isinstance(decision, Restart):
            await asyncio.sleep(decision.after_s)
            self._recoveries.starting(title)
            try:
                await start()
                break
            except PenstockError as again:
                if not is_recoverable(again):
                    raise
                self._note_fault(role, title, again)
                decision = self._recoveries.failed(title, self._clock(), self.step)
        else:
            raise failure
        seconds = self._recoveries.caught_up(title, self._clock())
        about = {"role": role, "member": title, "step": self.step, "tokens_again": tokens}
        self._directory.event("recovered", **about, seconds=round(seconds, 3))
        self._meters.add(RUN_REPLACED, member_role=role)
        self._note(f"{title} serves again after {seconds:.1f} s")

    def started(self, title: str) -> None:
        """Note that the process is there which takes the place of a lost member; it has to catch up."""
        self._recoveries.started(title)

    def beyond_help(self, role: str, title: str, failure: Exception) -> None:
        """Note a loss after which no new process alone can help, before the failure is raised."""
        if is_recoverable(failure):
            self._note_fault(role, title, failure)
            self._recoveries.beyond_help(title, role, self._clock(), self.step)

    def left(self, name: str) -> None:
        """Note that a member has left for good: nothing takes its place."""
        self._cancel(name)
        self._recoveries.gone(name, self._clock())

    def close(self, *but: str) -> None:
        """Cancel what is under way, but for the restarts of these titles."""
        self._cancel(*(self._tasks.keys() - set(but)))

    async def end(self) -> None:
        """Cancel what is under way, and wait until it has ended: the run ends, or returns to its checkpoint."""
        tasks = list(self._tasks.values())
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, *titles: str) -> None:
        for title in titles:
            if title in self._tasks:
                self._tasks[title].cancel()

    def _note_fault(self, role: str, title: str, failure: Exception) -> None:
        about = {"role": role, "member": title, "step": self.step, "error": type(failure).__name__}
        self._directory.event("fault", **about, message=str(failure))
        self._meters.add(RUN_LOST, member_role=role)

    def _remove(self, title: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[title]
        if not task.cancelled():
            task.exception()  # a failure that no caller waits for any more: the next one meets the loss itself


def title_of(team: Sequence[str]) -> str:
    """The name that people read: that of the member, or the first and last of a gang.

    >>> title_of(["Scorer-reference-0", "Scorer-reference-1"])
    'Scorer-reference-0 to Scorer-reference-1'
    """
    return team[0] if len(team) == 1 else f"{team[0]} to {team[-1]}"
