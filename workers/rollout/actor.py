"""`Rollout-i`: the Ray shell around one engine and its pull loop.

Started by `orchestrator/fleet/`. `run` leases prompts from a store until it closes; `load` is the controller's
call after each training step; `generate` serves evaluation and the imperative API.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.conf.weights import WeightsConfig
from penstock.metering.ray_export import Origin, exported
from penstock.store.client.client import StoreClient
from penstock.workers.concurrent_tasks import run_all
from penstock.workers.processes import ProcessId
from penstock.workers.progress import ASLEEP, LOADING, SERVING, Phases, Progress
from penstock.workers.protocols import Completion, Publication, Sampling
from penstock.workers.rollout.factory import make_engine
from penstock.workers.rollout.metered import MeteredEngine
from penstock.workers.rollout.thread_trial import ThreadedEngine, seconds_per_token
from penstock.workers.rollout.worker import RolloutWorker
from penstock.workers.serving import Serving
from penstock.workers.stacks import register
from penstock.workers.weights.streaming.engine_calls import ReceivingEngine
from penstock.workers.weights.transport import Delivery, Info, Part

LOOK_S = 0.05
"""Between two looks at an engine that is to finish."""


@dataclass(frozen=True)
class RolloutSpec:
    """What a rollout actor is made from. Plain data, so that it crosses Ray."""

    name: str
    config: RolloutConfig
    model_path: str
    num_threads: int
    seed: int
    group_size: int
    greedy: bool = False
    """Serve the greedy stage as well."""
    transport: str = "shm"
    """By which new weights come: `conf/weights.py`."""
    adapter: LoraConfig | None = None
    """Those are adapters of this kind; None: whole models."""
    phase_timeout_s: float = WeightsConfig.phase_timeout_s
    """Of each phase of a weight sync."""
    num_peers: int = 1
    """Engines that start with this one, itself included: they share the groups from the first on."""
    pulls: bool = True
    """Prompts out of the store; otherwise it samples what environments ask for, by `generate`."""
    origin: Origin | None = None
    """Of what it measures; None: that goes nowhere."""


class Rollout:
    """Lifecycle: `start` once, then `run` and `load` side by side, then `close`. `run` with another store ends the one
    before; the engine stays as it is."""

    def __init__(self, spec: RolloutSpec) -> None:
        self._spec = spec
        self._phases = Phases()
        meters = exported(spec.origin) if spec.origin is not None else None
        self._receiver = make_engine(
            spec.config,
            spec.model_path,
            num_threads=spec.num_threads,
            transport=spec.transport,
            adapter=spec.adapter,
            phase_timeout_s=spec.phase_timeout_s,
            by_priority=not spec.pulls,
            meters=meters,
        )
        self._engine = MeteredEngine(self._receiver, meters) if meters is not None else self._receiver
        self._workers = [self._worker(greedy) for greedy in ((False, True) if spec.greedy else (False,))]
        self._serving = Serving(self._serve)

    def __repr__(self) -> str:
        return self._spec.name

    def _worker(self, greedy: bool) -> RolloutWorker:
        spec = self._spec
        return RolloutWorker(
            self._engine,
            Sampling.of(spec.config.sampling),
            spec.name,
            spec.seed if spec.config.sampling.seeded else None,
            num_samples=1 if greedy else spec.group_size,
            max_concurrent_samples=spec.config.max_concurrent_samples,
            generate_timeout_s=spec.config.generate_timeout_s,
            greedy=greedy,
            num_workers=spec.num_peers,
        )

    async def start(self) -> None:
        await self._engine.start()
        self._phases.enter(SERVING)

    async def run(self, store: Any) -> None:
        """Serve the store's rollout stages until it closes."""
        await self._serving.run(store)

    async def _serve(self, store: StoreClient) -> None:
        if self._spec.pulls:
            await run_all(worker.run(store) for worker in self._workers)
        else:
            await store.until_closed()

    async def drain(self, timeout_s: float) -> None:
        """Take no more groups, finish those that are here, and the calls of `generate`; what is not done after so many
        seconds goes back. Then `run` has returned."""
        give_up = time.monotonic() + timeout_s
        await self._serving.drain(timeout_s)
        while self._engine.sampled().num_in_flight and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_S)

    async def generate(
        self, prompts: Sequence[Sequence[int]], num_samples: int, samplings: Sequence[Sampling]
    ) -> list[list[Completion]]:
        """`num_samples` responses to each prompt, at the weights that the engine has now."""
        requests = zip(prompts, samplings, strict=True)
        return list(
            await asyncio.gather(
                *(self._engine.generate(prompt, num_samples, sampling) for prompt, sampling in requests)
            )
        )

    async def load(self, delivery: Delivery) -> None:
        """Load a publication, or a version that is being streamed, which `deliver` brings meanwhile."""
        with self._phases.within(LOADING):
            await self._engine.load(cast(Publication, delivery))  # engines that are not vLLM's are sent nothing else

    async def connect(self, init_info: Info) -> None:
        """The trainer's first rank calls it, once, where weights are streamed."""
        await self._receiving.connect(init_info)

    async def deliver(self, part: Part) -> None:
        """The trainer's first rank calls it while `load` runs. Returns when the part is loaded."""
        await self._receiving.deliver(part)

    @property
    def _receiving(self) -> ReceivingEngine:
        """Streams are for vLLM engines alone, as `choose_transport` sees to."""
        return cast(ReceivingEngine, self._receiver)

    async def sleep(self) -> None:
        """Leave the device to the trainer."""
        await self._engine.sleep()
        self._phases.enter(ASLEEP)

    async def wake(self) -> None:
        await self._engine.wake()
        self._phases.enter(SERVING)

    async def try_threads(self, counts: Sequence[int], num_groups: int) -> dict[int, float]:
        """Seconds that a token takes, by threads, where so many groups are decoded together."""
        seed = 0 if self._spec.config.sampling.seeded else None
        return await seconds_per_token(self._threaded, counts, num_groups, self._spec.group_size, seed)

    async def use_threads(self, num_threads: int) -> None:
        """Compute by so many from now on."""
        await self._threaded.use_threads(num_threads)

    @property
    def _threaded(self) -> ThreadedEngine:
        """vLLM's on a CPU alone, as `placement/threads.py` sees to."""
        return cast(ThreadedEngine, self._receiver)

    async def version(self) -> int:
        return await self._engine.version()

    async def process(self, stacks: str) -> ProcessId:
        """Who this process is. From now on a signal has it write its stacks below `stacks`."""
        return register(stacks)

    async def progress(self) -> Progress:
        """Tokens sampled, and samples in flight. At any time."""
        sampled = self._engine.sampled()
        return self._phases.progress(sampled.num_tokens, sampled.num_in_flight, sampled.tokens_in_flight)

    async def stats(self) -> dict[str, float]:
        """Of the sampled rollouts; of an engine that pulls none, what it samples is told by the environments."""
        return self._workers[0].stats() if self._spec.pulls else {}

    async def close(self) -> None:
        await self._engine.close()
