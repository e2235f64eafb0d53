"""The progress of a worker, by which the controller sees that it goes on. Every actor answers `progress()`, beside its
work; `orchestrator/membership/liveness.py` judges the answers.

    worker:    with phases.within(UPDATING): ...        answers:    phases.progress(num_done, num_in_flight)
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STARTING = "starting"
IDLE = "idle"
"""Phase of a trainer between two calls."""
SERVING = "serving"
"""Phase of a worker that does whatever the store has for it."""
WAITING = "waiting for its batch"
COMPUTING = "computing"
UPDATING = "updating"
PUBLISHING = "publishing weights"
LOADING = "loading weights"
ASLEEP = "asleep"
SAVING = "saving"
KEEPING = "copying its state"
RESUMING = "resuming"
EXPORTING = "writing the model"


@dataclass(frozen=True)
class Progress:
    """The progress of one worker at one moment."""

    phase: str
    phase_s: float
    """Seconds in the phase so far, by the worker's own clock."""
    num_done: int = 0
    """Number of an engine's tokens, those of samples under way included; of other workers' rows; of groups, for the
    prompts. Counted since the start; falls only when work under way is given up."""
    num_in_flight: int = 0
    """Number of samples that an engine decodes, or of rows that another worker holds."""
    tokens_in_flight: int = 0
    """Response tokens of those in flight, which are done again if the worker dies. For engines, those so far; 0 for
    roles whose work on a token is no model's."""


SERVES = Progress(SERVING, 0.0)
"""The progress of an actor that answers, and has nothing to be stuck in."""


class Phases:
    """The present phase of a worker. Noted by the thread that works, read by another one that answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._present = STARTING, clock()

    def enter(self, phase: str) -> None:
        self._present = phase, self._clock()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Be in a phase within the block. Afterwards the previous phase begins anew."""
        before, _ = self._present
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def progress(self, num_done: int = 0, num_in_flight: int = 0, tokens_in_flight: int = 0) -> Progress:
        phase, since = self._present
        return Progress(phase, self._clock() - since, num_done, num_in_flight, tokens_in_flight)
