"""An engine that is measured: any `RolloutEngine`, whose work is noted in `Meters`.

    actor, worker ─▶ MeteredEngine ─▶ engine
                          │ each second, from `engine.sampled()`: tokens, running, waiting; and how long a load took
                          ▼
                        Meters

What only vLLM knows (KV cache, prefixes, phases of a load) is noted by its engine.

`seconds_per_token` measures vLLM's CPU engine, by the threads that it computes with, before the first step, where
engines and ranks run at the same time; `orchestrator/cluster/placement/threads.py` divides the threads.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Protocol, cast

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.workers.calls.sample_calls import AdapterEngine, SampleCall, SampleOutput
from penstock.workers.lifecycle.concurrent_tasks import BusyClock
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.protocols import Completion, Publication, RolloutEngine, Sampled, Sampling

LOOK_S = 1.0
"""Seconds between two looks at what the engine has sampled: as often as numbers are exported."""
NUM_TOKENS = 16
"""Decode steps of a try."""
NUM_TRIES = 3
"""Number of tries, of which the shortest counts: first ones are slower, and so is one that something else has
disturbed."""
MOST_SAMPLES = 256
"""Most samples that are decoded together."""


class MeteredEngine:
    """Lifecycle: that of the engine, which it looks at from `start` until `close`."""

    def __init__(self, engine: RolloutEngine, meters: Meters) -> None:
        self.engine = engine
        self._meters = meters
        self._clock = BusyClock()
        self._num_tokens = 0
        self._busy_s = 0.0
        """Tokens and busy seconds noted so far."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.engine.start()
        self._num_tokens = self.engine.sampled().num_tokens  # less those of a warm-up
        self._looking = asyncio.create_task(self._look_again_and_again())

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        seen = () if pictures is None else (pictures,)
        with self._clock.interval():
            completions = await self.engine.generate(prompt_ids, num_samples, sampling, *seen)
        self._meters.add(table.ROLLOUT_SAMPLES, num_samples)
        return completions

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        with self._clock.interval():
            output = await cast(AdapterEngine, self.engine).sample(adapter, call)
        self._meters.add(table.ROLLOUT_SAMPLES, call.num_samples)
        return output

    async def load(self, publication: Publication) -> None:
        started = time.perf_counter()
        await self.engine.load(publication)
        self._meters.observe(table.ROLLOUT_LOAD, time.perf_counter() - started)

    async def version(self) -> int:
        return await self.engine.version()

    def sampled(self) -> Sampled:
        return self.engine.sampled()

    async def nonfinite_weights(self) -> list[str]:
        return await self.engine.nonfinite_weights()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self.engine.close()

    def look(self) -> None:
        """Note what was sampled since the last time. Aborted work counts as far as it had come."""
        sampled, busy_s = self.engine.sampled(), self._clock.seconds()
        self._meters.add(table.ROLLOUT_TOKENS, max(0, sampled.num_tokens - self._num_tokens))
        self._meters.add(table.ROLLOUT_BUSY, busy_s - self._busy_s)
        self._meters.put(table.ROLLOUT_RUNNING, sampled.num_in_flight - sampled.num_waiting)
        self._meters.put(table.ROLLOUT_WAITING, sampled.num_waiting)
        self._num_tokens, self._busy_s = sampled.num_tokens, busy_s

    async def _look_again_and_again(self) -> None:
        self._meters.add(table.ROLLOUT_SAMPLES, 0)
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)


class ThreadedEngine(Protocol):
    """An engine whose threads can be changed while it serves: vLLM's, on a CPU."""

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]: ...

    async def use_threads(self, num_threads: int) -> None: ...


async def seconds_per_token(
    engine: ThreadedEngine, counts: Sequence[int], num_groups: int, group_size: int, seed: int | None
) -> dict[int, float]:
    """Seconds for a token, by threads, where so many groups of samples are decoded together. `seed`: None where samples
    have none."""
    num_groups = max(1, min(num_groups, MOST_SAMPLES // group_size))
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
    found = {}
    for count in counts:
        await engine.use_threads(count)
        found[count] = min([await _per_token(engine, num_groups, group_size, sampling) for _ in range(NUM_TRIES)])
    return found


async def _per_token(engine: ThreadedEngine, num_groups: int, group_size: int, sampling: Sampling) -> float:
    """Seconds for a token in one try. The prompts are token 0, which every model has."""
    clock = asyncio.get_running_loop().time
    started = clock()
    groups = await asyncio.gather(*(engine.generate([0], group_size, sampling) for _ in range(num_groups)))
    return (clock() - started) / sum(len(sample.token_ids) for group in groups for sample in group)
