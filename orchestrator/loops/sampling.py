"""Samples that a session's loop asks for, many at a time: each call goes to the engine with the fewest samples under
way.

    begin ─▶ seed, engine ─▶ a task in a thread of its own ─▶ a future with a deadline, whose `cancel` ends the call
"""

import concurrent.futures
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.orchestrator.cluster.ray_calls import Handles, answers_or_end
from penstock.orchestrator.loops.thread import LoopThread
from penstock.orchestrator.loops.verbs import seed_of
from penstock.workers.calls.sample_calls import SampleCall, SampleOutput


class SampleCalls:
    """Lifecycle: `begin` any number, `settle` before the engines' weights change, `close`."""

    def __init__(self, engines: Callable[[], Handles], seed: int, timeout_s: float) -> None:
        """`engines`: those that are there now. `seed`: the run's. `timeout_s`: deadline of a call."""
        self._engines, self._seed, self._timeout_s = engines, seed, timeout_s
        self._thread = LoopThread("samples")
        self._num_under_way: Counter[str] = Counter()
        self._calls: set[Future[SampleOutput]] = set()
        self._lock = threading.Lock()
        self.num_begun = 0
        """Number of calls so far, which seeds those without a seed."""

    def begin(self, call: SampleCall) -> "Future[SampleOutput]":
        with self._lock:
            members, number = self._engines(), self.num_begun
            if not members:
                raise WorkerDied("no engine is left to sample: `rollouts.add` one.")
            self.num_begun += 1
            name, handle = min(members, key=lambda member: self._num_under_way[member[0]])
            self._num_under_way[name] += call.num_samples
        if call.sampling.seed is None:
            call = replace(call, sampling=call.sampling.seeded(seed_of("sample", self._seed, number)))
        future = self._thread.submit(self._sampled(name, handle, call))
        self._calls.add(future)
        future.add_done_callback(lambda ended: self._ended(name, call.num_samples, ended))
        return future

    def settle(self) -> None:
        """Wait for the calls under way, whatever they end with. Raises `DeadlineExceeded`."""
        late = concurrent.futures.wait(list(self._calls), self._timeout_s).not_done
        if late:
            raise DeadlineExceeded(
                f"{len(late)} calls of sample have not ended within {self._timeout_s:g} s "
                "(rollout.generate_timeout_s), and samples keep the weights that they were begun with."
            )

    def close(self) -> None:
        self._thread.close()

    async def _sampled(self, name: str, handle: Any, call: SampleCall) -> SampleOutput:
        one = (name, handle.sample.remote(None, call, uuid.uuid4().hex))
        (output,) = await answers_or_end([one], phase="sample", timeout_s=self._timeout_s)
        return output  # type: ignore[no-any-return]

    def _ended(self, name: str, num_samples: int, future: "Future[SampleOutput]") -> None:
        with self._lock:
            self._num_under_way[name] -= num_samples
            self._calls.discard(future)
