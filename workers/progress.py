"""How far a worker is, for whoever watches that it goes on. Every actor answers `progress()`, beside its work;
`orchestrator/faults/liveness.py` judges the answers.

    who works:    with phases.within(UPDATING): ...        who answers:    phases.progress(num_done, num_in_flight)
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STARTING = "starting"
IDLE = "idle"
"""A trainer between two calls."""
SERVING = "serving"
"""Whatever the store has for it."""
WAITING = "waiting for its batch"
COMPUTING = "computing"
UPDATING = "updating"
PUBLISHING = "publishing weights"
LOADING = "loading weights"
ASLEEP = "asleep"
SAVING = "saving"
RESUMING = "resuming"
EXPORTING = "writing the model"


@dataclass(frozen=True)
class Progress:
    """Of one worker at one moment."""

    phase: str
    phase_s: float
    """Seconds in it so far, by the worker's own clock."""
    num_done: int = 0
    """Tokens of an engine, those of samples under way included; rows of anybody else, groups of the prompts. Since the
    start; falls only when work under way is given up."""
    num_in_flight: int = 0
    """Samples that an engine decodes; rows that anybody else holds."""
    tokens_in_flight: int = 0
    """Response tokens of these: what is done again if the worker dies. Of engines so far; 0 of roles whose work on a
    token is no model's."""


class Phases:
    """What a worker does at the moment. Noted by the thread that works, read by another one that answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._present = STARTING, clock()

    def enter(self, phase: str) -> None:
        self._present = phase, self._clock()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Afterwards it is in the phase of before, which begins anew."""
        before, _ = self._present
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def progress(self, num_done: int = 0, num_in_flight: int = 0, tokens_in_flight: int = 0) -> Progress:
        phase, since = self._present
        return Progress(phase, self._clock() - since, num_done, num_in_flight, tokens_in_flight)
