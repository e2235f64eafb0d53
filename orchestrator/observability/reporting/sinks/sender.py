"""Brings metrics to a tracker from a thread of its own, so that a slow, absent or broken one costs the run nothing.

    controller ── log ──▶ queue of at most 1,000 steps ──▶ thread ── open, log, …, finish ──▶ W&B, MLflow, trackio
                   └ NewSteps                                └ TrackerState: trackers/NAME.json, for the next process

What cannot be sent is tried again; what is lost is counted and told by `run_directory/failed_writes.py`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from penstock.orchestrator.observability.reporting.sinks.tracker import (
    About,
    End,
    NewSteps,
    Tracker,
    TrackerState,
    numbers,
)
from penstock.orchestrator.run_directory.run_directory import RunDirectory

MAX_WAITING = 1_000
"""Most steps in memory; beyond that the oldest is lost."""
MAX_TRIES = 3
"""Most tries of one step, which may itself be what makes the tracker fail."""
PAUSE_S = 10.0
"""Seconds to wait after an attempt that failed."""
TRIED_AGAIN = f"The run goes on. Up to {MAX_WAITING:,} steps wait for it in memory."
FULL = f"{MAX_WAITING:,} steps wait for it"
MAX_ERROR_CHARS = 300


class Sender:
    """Lifecycle: `begin`, `log` at any time, `finish` when the run has ended, then `close`. Only `close` waits for
    the tracker, until `timeout_s` after `finish`.

        sender = Sender("wandb", Wandb(config.tracking.wandb, 30.0), About.of(config, directory), directory, 30.0)
        sender.begin()
        sender.log(1, {"reward/mean": 0.5})
        sender.finish(End("finished"))
        sender.close()
    """

    def __init__(
        self, name: str, tracker: Tracker, about: About, directory: RunDirectory, timeout_s: float,
        pause_s: float = PAUSE_S, max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        self.name = name
        self._tracker, self._about, self._directory, self._failed_writes = (
            tracker,
            about,
            directory,
            directory.failed_writes,
        )
        self._timeout_s, self._pause_s, self._max_waiting = timeout_s, pause_s, max_waiting
        self._state = TrackerState(directory, name)
        self._new = NewSteps(self._state.step)
        self._changed = threading.Condition()
        """Lock of all fields below."""
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._sending = 0
        """Number of steps that the thread has taken out: 0 or 1."""
        self._end: End | None = None
        self._give_up_at = 0.0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        new = self._new.of(step, {name: value for name, value in numbers(metrics).items() if name != "step"})
        if not new:
            return
        with self._changed:
            self._waiting.append((step, new))
            is_full = self._cut()
            self._changed.notify_all()
        if is_full:
            self._failed_writes.fails(f"{self.name} queue", TimeoutError(FULL), "The oldest of its steps are lost.")

    def finish(self, end: End) -> None:
        with self._changed:
            if self._end is None:
                self._end, self._give_up_at = end, time.monotonic() + self._timeout_s
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the tracker has everything, or will not get it. May be called twice."""
        self.finish(End("unknown"))
        self._thread.join(max(0.0, self._give_up_at - time.monotonic()))
        with self._changed:
            num_lost = len(self._waiting) + self._sending
            is_late = self._thread.is_alive() and not self._is_abandoned
            self._is_abandoned = True
            self._waiting.clear()
            self._sending = 0
        if num_lost:
            self._failed_writes.loses(self.name, num_lost)
        self._failed_writes.waits(self.name, 0)
        if is_late:
            self._failed_writes.tell(
                f"{self.name}: has not closed within {self._timeout_s:g} s, and is left. {_lacks(num_lost)}"
            )
        elif num_lost:
            self._failed_writes.tell(f"{self.name}: {_lacks(num_lost)}")

    # In the thread.

    def _run(self) -> None:
        while not self._attempt(self._open):
            if self._end is not None:
                return
            self._pause()
        tries = 0
        while (entry := self._next()) is not None:
            if self._attempt(lambda: self._log(*entry)):
                tries = 0
                continue
            tries += 1
            is_lost = tries == MAX_TRIES or self._end is not None
            self._put_back(entry, is_lost)
            tries = 0 if is_lost else tries
            self._pause()
        if not self._is_abandoned:
            self._attempt(self._finish)

    def _open(self) -> None:
        opened = self._tracker.open(self._about, self._state.id)
        if self._is_abandoned:
            return
        self._state.keep(opened.id)
        self._directory.event("tracked", tracker=self.name, id=opened.id, place=opened.place)
        self._failed_writes.tell(f"{self.name}: {opened.place}")

    def _log(self, step: int, new: Mapping[str, float]) -> None:
        self._tracker.log(step, new)
        if not self._is_abandoned:  # or the directory may be another process's
            self._state.keep_step(step)

    def _finish(self) -> None:
        assert self._end is not None
        self._tracker.finish(self._end)

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Make a call. Returns whether it succeeded. What it raises is told."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run, whatever its package raises
            if not self._is_abandoned:
                self._failed_writes.fails(self.name, _short(error), TRIED_AGAIN if self._end is None else "")
            return False
        if not self._is_abandoned:
            self._failed_writes.works(self.name)
        return True

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """The next step to send; None at the end."""
        with self._changed:
            self._sending = 0
            self._changed.wait_for(lambda: self._waiting or self._end is not None or self._is_abandoned)
            entry = self._waiting.popleft() if self._waiting and not self._is_abandoned else None
            self._sending = 0 if entry is None else 1
            self._failed_writes.waits(self.name, len(self._waiting))
        return entry

    def _put_back(self, entry: tuple[int, dict[str, float]], is_lost: bool) -> None:
        with self._changed:
            if self._is_abandoned:
                return
            self._sending = 0
            if is_lost:
                self._failed_writes.loses(self.name)
            else:
                self._waiting.appendleft(entry)
                self._cut()

    def _cut(self) -> bool:
        """Drop the oldest step if there are too many. Returns whether there were."""
        is_full = len(self._waiting) > self._max_waiting
        if is_full:
            self._waiting.popleft()
            self._failed_writes.loses(self.name)
        self._failed_writes.waits(self.name, len(self._waiting))
        return is_full

    def _pause(self) -> None:
        """Wait until the next attempt; once the run has ended, do not."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._is_abandoned, self._pause_s)


def _lacks(num_lost: int) -> str:
    return f"It lacks {num_lost:,} steps; metrics.jsonl has them." if num_lost else "It has every step."


def _short(error: Exception) -> Exception:
    """The error with the first line of its message: packages put whole pages into theirs."""
    lines = str(error).strip().splitlines()
    return RuntimeError(f"{type(error).__name__}: {lines[0][:MAX_ERROR_CHARS]}" if lines else type(error).__name__)
