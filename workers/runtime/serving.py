"""The service of an actor for a store until it closes, its progress, and the share of failures that a run bears.

Every actor answers `progress()`, beside its work; `orchestrator/recovery/liveness.py` judges the answers.

    worker:    with phases.within(UPDATING): ...        answers:    phases.progress(num_done, num_in_flight)

A `run` with another store replaces the previous one; with the same store, it is a second call for the same work, by
another process that drives the run.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import PenstockError, RewardFailure
from penstock.network.host import bypass_proxy
from penstock.store.client.store_client import StoreClient
from penstock.workers.runtime.builds import hide_gpus
from penstock.workers.runtime.processes import ProcessId, register

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
EARLY_ERRORS = 20
"""Number of results that, if all of them failed, end a run before the window is full."""


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


class Serving:
    """Lifecycle: `run` any number of times. One task serves at a time, with a client of its own.

    serving = Serving(worker.run)
    await serving.run(store)        # until the store closes
    await serving.run(store)        # meanwhile: returns with the first call
    await serving.run(other_store)  # meanwhile: the first call returns once its tasks have ended, then this one serves
    await serving.drain(30.0)       # meanwhile: finish what is held, then `run` returns
    """

    def __init__(self, serve: Callable[[StoreClient], Awaitable[None]]) -> None:
        self._serve = serve
        self._running: asyncio.Task[None] | None = None
        self._store: Any = None
        self._client: StoreClient | None = None
        """Store and client of the task that serves."""
        self._turn = asyncio.Lock()

    async def run(self, store: Any) -> None:
        """Serve the store. Raises what serving raises."""
        mine = self._running
        if mine is None or mine.done() or store != self._store:
            if mine is not None:
                mine.cancel()
            self._running = mine = asyncio.create_task(self._run(store))
            self._store = store
        try:
            await mine
        except asyncio.CancelledError:
            if mine is self._running:  # it was this call that was cancelled
                raise

    async def retire(self) -> None:
        """Take no more leases: once this returns, the store grants none. `run` returns when what is held is done."""
        if self._client is not None:
            await self._client.retire()
        elif self._running is not None:  # it waits for its turn, and has leased nothing
            running, self._running = self._running, None  # so `run` returns
            running.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Take no more leases, and finish those that are held; after `timeout_s` give the rest back. Then `run` has
        returned. Does nothing where no task serves."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._client is not None:
            await self._client.retire()
            await asyncio.wait([running], timeout=timeout_s)
        running.cancel()
        await asyncio.wait([running])

    async def _run(self, store: Any) -> None:
        async with self._turn:
            self._client = client = StoreClient(store)
            try:
                await self._serve(client)
            finally:
                self._client = None
                await client.leave()


class ServingActor:
    """Base of the Ray shells that serve a store: the calls that the controller makes to each of them.

    Lifecycle: `start`, then `run` until the store closes; `run` with another store ends the previous one; `close`.
    """

    _worker: Any = None
    """Worker whose `run` serves a store, and whose `stats` are the actor's."""

    def __init__(self, name: str, num_gpus: float = 0) -> None:
        """`num_gpus`: those that it may use; 0: it sees none."""
        if not num_gpus:
            hide_gpus()
        bypass_proxy()
        self._name, self._phases = name, Phases()
        self._serving = Serving(self._serve)

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> None:
        """Load what it works with; from then on it serves."""
        self._phases.enter(SERVING)

    async def run(self, store: Any) -> None:
        """Serve the store until it closes."""
        await self._serving.run(store)

    async def _serve(self, store: StoreClient) -> None:
        """Serve the store with this client until it closes."""
        await self._worker.run(store)

    async def stats(self) -> dict[str, float]:
        """Counts since the start."""
        counts: dict[str, float] = self._worker.stats() if self._worker is not None else {}
        return counts

    async def retire(self) -> None:
        """Take no more work: once this returns, the store grants none. What is here may be finished."""
        await self._serving.retire()

    async def drain(self, timeout_s: float) -> None:
        """Take no more work and finish what is here; what is not done after `timeout_s` goes back. Then `run` has
        returned."""
        await self._serving.drain(timeout_s)

    async def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    async def close(self) -> None:
        """End nothing, unless the actor has something to end: there is the same call for every actor."""


class ErrorShare:
    """Counts results and says when too many have failed.

    Too many are more failures among the last `window` results than `max_share` of a full window, or nothing but
    failures from the start. `max_share=1` never ends a run.
    """

    def __init__(
        self, max_share: float, window: int, what: str = "rewards", key: str = "reward",
        error: type[PenstockError] = RewardFailure,
    ) -> None:  # fmt: skip
        """`what`: name of what is counted, for messages. `key`: the section of the configuration that has
        max_error_share. `error`: raised where too many have failed."""
        self.max_share, self.window, self._what, self._key, self._error = max_share, window, what, key, error
        self.recent: deque[bool] = deque(maxlen=window)
        self.succeeded = self.failed = self.not_counted = 0
        self.last_error = ""

    def add(self, error: str | None) -> None:
        """Count one result: None, or what it failed with."""
        self.recent.append(error is not None)
        if error is not None:
            self.failed += 1
            self.last_error = error
        else:
            self.succeeded += 1

    def leave_out(self) -> None:
        """Note a sample that does not count. A run of nothing else ends, too."""
        self.not_counted += 1

    def check(self) -> None:
        """Raise the error, with the last failure, if too many have failed, or nothing has counted."""
        if self.max_share < 1 and not self.succeeded + self.failed and self.not_counted >= self.window:
            raise self._error(
                f"the first {self.not_counted} {self._what} were all None, which is TRL's word for a sample that does "
                "not count. Check the columns that the function reads."
            )
        failures, seen = sum(self.recent), len(self.recent)
        hopeless = self.max_share < 1 and self.succeeded == 0 and self.failed >= min(EARLY_ERRORS, self.window)
        if hopeless or failures > self.max_share * self.window:
            raise self._error(
                f"{failures} of the last {seen} {self._what} failed, more than "
                f"{self._key}.max_error_share={self.max_share:g} of {self.window} allows. The last one: "
                f"{self.last_error} Mend what fails, or raise {self._key}.max_error_share."
            )
