"""The state that a command leaves for the one that may come after it, told to the run's owner while the run goes on.

every second    which actors are where, if that has changed
each step       the ranks' reports, before the store is told: a step that was noted counts, whichever command
                completes it, and either one writes its line in metrics.jsonl
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.workers.trainer.report import StepReport

KEEP_S, LONGEST_S = 1.0, 10.0
"""Seconds between two looks at what has changed, least and most. A member that has come since is not known to the next
command, and ends."""
SHARE = 2000.0
"""Pause after a long look, in multiples of its time: with a thousand members there is a look every two or three
seconds."""


class Handover:
    """Lifecycle: `keep` once the fleet serves, `run` until it is cancelled, `note` each step; `leave` when there is
    nothing more to go on with. Where the actors end with this process, none of it does anything."""

    def __init__(self, owner: Owner, describe: Callable[[RunOwner], bytes]) -> None:
        """`describe`: returns the present state of the run."""
        self._owner = owner if isinstance(owner, RunOwner) else None
        self._describe = describe
        self._kept = b""
        self._took_s = 0.0
        """CPU seconds of this thread to describe the run the last time."""
        self._open: dict[int, list[StepReport]] = {}
        """Reports of the steps whose line is not written yet, by step."""

    async def keep(self) -> None:
        """Keep the present state, if it has changed. Raises `TakenOver`, `WorkerDied`, `DeadlineExceeded`, as the
        others do."""
        if self._owner is None:
            return
        began = time.thread_time()
        state = self._describe(self._owner)
        self._took_s = time.thread_time() - began
        if state != self._kept:
            await self._owner.keep(state)
            self._kept = state

    async def run(self) -> None:
        while self._owner is not None:
            await self.keep()
            await asyncio.sleep(min(LONGEST_S, max(KEEP_S, SHARE * self._took_s)))

    async def note(self, step: int, reports: Sequence[StepReport]) -> None:
        """Note a step that all ranks have made."""
        if self._owner is not None:
            self._open[step] = list(reports)
            await self._owner.note(self._open)

    async def confirm(self) -> None:
        """Raise `TakenOver` if another command drives the run by now: what comes next would harm it."""
        if self._owner is not None:
            await self._owner.renew()

    def written(self, step: int) -> None:
        """Note that the line of a step is written."""
        self._open.pop(step, None)

    async def leave(self) -> None:
        """Keep nothing from now on: the run is over, or its actors are."""
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.leave()
