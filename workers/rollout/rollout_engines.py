"""An engine for rollouts as its owner handles it: made by its name, metered, and timed with other numbers of threads.

    actor, worker ─▶ engine, each call within `EngineMeter.sampling` or `loading`
                       │ each second, from `engine.sampled()`: tokens, running, waiting; and how long a load took
                       ▼
                     Meters

What only vLLM knows (KV cache, prefixes, phases of a load) is noted by its engine.

`seconds_per_token` times vLLM's CPU engine, by the threads that it computes with, before the first step, where engines
and ranks run at the same time; `orchestrator/cluster/placement/threads.py` divides the threads.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, cast

from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.checks import EXTRAS, need_extra, one_of
from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.workers.protocols import Completion, EngineSpec, RolloutEngine, Sampling
from penstock.workers.runtime.async_tasks import BusyClock, cancel_all
from penstock.workers.runtime.builds import check_build
from penstock.workers.runtime.processes import prepare_for_torch

POLL_S = 1.0
"""Seconds between two polls of the engine's progress: the interval in which metrics are exported."""
NUM_TOKENS = 16
"""Decode steps of a trial."""
NUM_TRIES = 3
"""Number of trials, of which the fastest counts: the first and disturbed ones are slower."""
MOST_SAMPLES = 256
"""Most samples that are decoded together."""


def make_engine(spec: EngineSpec, meters: Meters | None = None) -> RolloutEngine:
    """Make the engine that `rollout.engine` names, not started yet. Heavy imports happen here, and only for the engine
    that is made. `meters`: for the engine's own statistics (vLLM). Raises `ConfigError` for an unknown name, and
    for a package that is not installed, or whose build is for another device."""
    config = spec.config
    one_of("rollout.engine", config.engine, ROLLOUT_ENGINES)
    if config.engine in EXTRAS:
        need_extra(config.engine, f"rollout.engine={config.engine}")
    check_build(config)
    if config.capabilities.computes_in_actor and not config.num_gpus_per_worker:
        prepare_for_torch()
    module, _, function = config.capabilities.implementation.partition(":")
    return cast(RolloutEngine, getattr(import_module(module), function)(spec, meters))


class EngineMeter:
    """Lifecycle: `start` once the engine is started; `sampling` and `loading` around its calls; `close` before it."""

    def __init__(self, engine: RolloutEngine, meters: Meters | None) -> None:
        """`meters`: None where measurements are not exported; then the engine is not polled."""
        self._engine, self._meters, self._polls = engine, meters or Meters(), meters is not None
        self._clock = BusyClock()
        self._num_tokens = 0
        self._busy_s = 0.0
        """Tokens and busy seconds noted so far."""
        self._polling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._num_tokens = self._engine.sampled().num_tokens  # less those of a warm-up
        if self._polls:
            self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._polling is not None:
            await cancel_all([self._polling])

    @contextmanager
    def sampling(self, num_samples: int) -> Iterator[None]:
        """Note that the engine is busy within the block, and the samples of the call if the block succeeds."""
        with self._clock.interval():
            yield
        self._meters.add(table.ROLLOUT_SAMPLES, num_samples)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note how long a load took, if the block succeeds."""
        started = time.perf_counter()
        yield
        self._meters.observe(table.ROLLOUT_LOAD, time.perf_counter() - started)

    def note(self) -> None:
        """Note what was sampled since the last poll. Aborted work counts up to its end."""
        sampled, busy_s = self._engine.sampled(), self._clock.seconds()
        self._meters.add(table.ROLLOUT_TOKENS, max(0, sampled.num_tokens - self._num_tokens))
        self._meters.add(table.ROLLOUT_BUSY, busy_s - self._busy_s)
        self._meters.put(table.ROLLOUT_RUNNING, sampled.num_in_flight - sampled.num_waiting)
        self._meters.put(table.ROLLOUT_WAITING, sampled.num_waiting)
        self._num_tokens, self._busy_s = sampled.num_tokens, busy_s

    async def _poll(self) -> None:
        self._meters.add(table.ROLLOUT_SAMPLES, 0)
        while True:
            self.note()
            await asyncio.sleep(POLL_S)


class ThreadedEngine(Protocol):
    """An engine whose threads can be changed while it serves: vLLM's, on a CPU."""

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]: ...

    async def use_threads(self, num_threads: int) -> None: ...


async def seconds_per_token(
    engine: ThreadedEngine, counts: Sequence[int], num_groups: int, group_size: int, seed: int | None, policy: str = ""
) -> dict[int, float]:
    """Seconds per token for each number of threads, with so many groups decoded together. `seed`: None for unseeded
    samples. `policy`: one that the engine has."""
    num_groups = max(1, min(num_groups, MOST_SAMPLES // group_size))
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, policy=policy)
    found = {}
    for count in counts:
        await engine.use_threads(count)
        found[count] = min([await _per_token(engine, num_groups, group_size, sampling) for _ in range(NUM_TRIES)])
    return found


async def _per_token(engine: ThreadedEngine, num_groups: int, group_size: int, sampling: Sampling) -> float:
    """Seconds per token in one trial. The prompts are token 0, which every model has."""
    clock = asyncio.get_running_loop().time
    started = clock()
    groups = await asyncio.gather(*(engine.generate([0], group_size, sampling) for _ in range(num_groups)))
    return (clock() - started) / sum(len(sample.token_ids) for group in groups for sample in group)
