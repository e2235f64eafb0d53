"""`Rollout-i`: the Ray shell around one engine and its pull loop.

`run` leases prompts from a store until it closes; `load` is the controller's
call after each training step; `generate` serves evaluation and the imperative API;
`sample` serves the clients of a server, each its own adapter; `probe` compares the engine with the trainer, or with
what it has sampled.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from penstock.conf.capabilities import ROLLOUT_ENGINES, names_with
from penstock.conf.errors import ConfigError, WorkerDied
from penstock.metering.ray_export import Origin, exported
from penstock.store.client.store_client import StoreClient
from penstock.store.epoch import Epoch
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.probing import ProbeAnswer, ProbeRow, RecentSamples, call_of, compare
from penstock.workers.protocols import (
    AdapterEngine,
    AdapterState,
    Completion,
    EngineSpec,
    KvLoad,
    Publication,
    RolloutEngine,
    SampleCall,
    SampleOutput,
    Sampling,
)
from penstock.workers.rollout.rollout_engines import EngineMeter, ThreadedEngine, make_engine, seconds_per_token
from penstock.workers.rollout.rollout_worker import (
    ACCEPTED,
    DRAFTED,
    PAUSED,
    READ_AGAIN,
    GroupIntake,
    RolloutWorker,
    fault_of,
)
from penstock.workers.runtime.async_tasks import run_all
from penstock.workers.runtime.numerics import numerics
from penstock.workers.runtime.serving import ASLEEP, LOADING, SERVING, Progress, ServingActor
from penstock.workers.weights.engine_calls import Delivery, Info, ReceivingEngine, StreamPart

POLL_S = 0.05
"""Seconds between two checks of an engine that finishes its requests."""


@dataclass(frozen=True)
class RolloutSpec:
    """The specification that a rollout actor is made from. Plain data, so that it can be sent through Ray."""

    name: str
    engine: EngineSpec
    seed: int
    group_size: int
    greedy: bool = False
    """True if the greedy stage is served as well."""
    num_peers: int = 1
    """Engines that start with this one, itself included: they share the groups from the start."""
    pulls: bool = True
    """True if it takes prompts out of the store; otherwise it samples what environments ask for, by `generate`."""
    origin: Origin | None = None
    """Origin of its measurements; None: they are not exported."""


class FullEngine(RolloutEngine, AdapterEngine, ReceivingEngine, ThreadedEngine, Protocol):
    """An engine with all methods that engines may have. Its capabilities say which it has; `choose_transport` and
    `placement/threads.py` use no other."""


class Rollout(ServingActor):
    """Lifecycle: that of every `ServingActor`; `load` concurrently with `run`. With another store the engine stays as
    it is."""

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__(spec.name, spec.engine.config.num_gpus_per_worker)
        self._spec = spec
        self._epoch = Epoch()
        self._death: WorkerDied | None = None
        """The engine's death, once a call has met it."""
        self.has_died = asyncio.Event()
        """Set once a call has met the death of the engine."""
        self._calls: dict[str, asyncio.Task[SampleOutput]] = {}
        """Calls of `sample` under way, by their ids."""
        meters = exported(spec.origin) if spec.origin is not None else None
        self._engine = cast(FullEngine, make_engine(replace(spec.engine, by_priority=not spec.pulls), meters))
        self._meter = EngineMeter(self._engine, meters)
        config = spec.engine.config
        recent = RecentSamples(config.max_model_len, keeps_caches=config.keeps_caches)
        self._recent = recent if spec.engine.is_probed else None
        self._workers = [self._worker(greedy) for greedy in ((False, True) if spec.greedy else (False,))]

    def _worker(self, greedy: bool) -> RolloutWorker:
        spec, config = self._spec, self._spec.engine.config
        intake = GroupIntake(
            spec.name, Sampling.of(config.sampling), spec.seed if config.sampling.seeded else None,
            1 if greedy else spec.group_size, config.max_concurrent_samples, spec.num_peers,
            frozenset() if greedy else config.truncated_to("drop"), config.max_error_share,
        )  # fmt: skip
        return RolloutWorker(
            self._engine, intake, timeout_s=config.generate_timeout_s, greedy=greedy, meter=self._meter,
            recent=self._recent,
        )  # fmt: skip

    async def start(self, gpus: Sequence[str] = ()) -> None:
        """Start the engine. `gpus`: the GPUs to use, where Ray has assigned them to the ranks that share them."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        await self._engine.start()
        self._meter.start()
        await super().start()

    async def _serve(self, store: StoreClient) -> None:
        if self._spec.pulls:
            await run_all(worker.run(store) for worker in self._workers)
        else:
            await self._until_closed(store)

    async def _until_closed(self, store: StoreClient) -> None:
        """Serve until the store is closed. Raises the death of the engine: environments that meet it continue with
        another engine, and report it to nobody."""
        closing, dying = asyncio.ensure_future(store.until_closed()), asyncio.ensure_future(self.has_died.wait())
        try:
            await asyncio.wait([closing, dying], return_when=asyncio.FIRST_COMPLETED)
            if self._death is not None:
                raise self._death
            closing.result()
        finally:
            closing.cancel()
            dying.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Lease no more groups, and finish the leased ones and the calls of `generate`. What is unfinished after
        `timeout_s` goes back to the store. Then `run` has returned."""
        give_up = time.monotonic() + timeout_s
        await super().drain(timeout_s)
        while self._engine.sampled().num_in_flight and time.monotonic() < give_up:
            await asyncio.sleep(POLL_S)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        samplings: Sequence[Sampling],
        pictures: Sequence[PromptPictures | None] = (),
    ) -> list[list[Completion]]:
        """Sample `num_samples` responses to each prompt with the present weights. `pictures`: of each prompt; none in a
        run of text."""
        requests = zip(prompts, samplings, pictures or [None] * len(prompts), strict=True)
        with self._recording_death():
            return list(await asyncio.gather(*(self._generate(*request, num_samples) for request in requests)))

    async def _generate(
        self, prompt: Sequence[int], sampling: Sampling, pictures: PromptPictures | None, num_samples: int
    ) -> list[Completion]:
        with self._meter.sampling(num_samples):
            seen = [] if pictures is None else [pictures]
            completions = await self._engine.generate(prompt, num_samples, sampling, *seen)
        if self._recent is not None and pictures is None:
            self._recent.note(prompt, sampling, completions)
        return completions

    async def fault_of(self, prompt_ids: Sequence[int], completion: Completion) -> str:
        """Describe a response whose log-probabilities are not finite, and the engine's weights."""
        with self._recording_death():
            return await fault_of(self._engine, self._spec.name, prompt_ids, completion)

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        """Serve an adapter from now on. Raises as `AdapterEngine` does."""
        with self._recording_death():
            await self._adapter_engine.add_adapter(name, state)

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter, if it is known; its calls under way still end with it."""
        with self._recording_death():
            await self._adapter_engine.drop_adapter(name)

    async def adapters(self) -> list[str]:
        """Names of the adapters that the engine serves. A new actor's engine has none."""
        return self._adapter_engine.adapters()

    async def sample(self, adapter: str | None, call: SampleCall, request_id: str) -> SampleOutput:
        """Sample from an adapter; None: from the published weights. Raises as `AdapterEngine` does, and
        `asyncio.CancelledError` when it was aborted, or cancelled by `ray.cancel`."""
        task = self._calls[request_id] = asyncio.create_task(self._adapter_engine.sample(adapter, call))
        try:
            with self._recording_death(), self._meter.sampling(call.num_samples):
                return await task
        finally:
            task.cancel()
            if self._calls.get(request_id) is task:
                del self._calls[request_id]

    async def probe(self, version: int, row: ProbeRow | None, most_tokens: int) -> ProbeAnswer | None:
        """Score again a row that the trainer has scored under a version. None instead of a row: a sample of the
        engine's own, of at most `most_tokens` tokens. Returns None where the engine has another version, or nothing to
        compare. Raises `WorkerDied`."""
        with self._recording_death():
            if self._recent is None or await self._engine.version() != version:
                return None
        known = row or self._recent.take(version, most_tokens)
        if known is None:
            return None
        kind = "own" if row is None else "row"
        output = await self.sample(None, call_of(known, row is None), f"probe-{kind}-{version}")
        return compare(known, output, row is None)

    async def abort(self, request_id: str) -> None:
        """End a call of `sample`, if it is under way."""
        if request_id in self._calls:
            self._calls[request_id].cancel()

    @contextmanager
    def _recording_death(self) -> Iterator[None]:
        """Let `run` raise the engine's death, if the block meets it."""
        try:
            yield
        except WorkerDied as death:
            self._death = death
            self.has_died.set()
            raise

    @property
    def _adapter_engine(self) -> AdapterEngine:
        """The engine, if it serves adapters. Raises `ConfigError`."""
        config = self._spec.engine.config
        if not config.capabilities.serves_adapters:
            names = names_with("serves_adapters", ROLLOUT_ENGINES)
            raise ConfigError(
                f"rollout.engine={config.engine}: serves no adapters by name. Set rollout.engine={names}."
            )
        return self._engine

    async def load(self, delivery: Delivery, epoch: int = 0) -> None:
        """Load a publication, or a version that is being streamed, which `deliver` brings meanwhile. Raises `TakenOver`
        for an `epoch` that is older than another's."""
        self._epoch.check(epoch)
        with self._phases.within(LOADING), self._meter.loading():
            await self._engine.load(cast(Publication, delivery))  # engines that are not vLLM's are sent nothing else

    async def connect(self, init_info: Info) -> None:
        """Connect the engine to the trainer. The trainer's first rank calls it, once, where weights are streamed."""
        await self._engine.connect(init_info)

    async def deliver(self, part: StreamPart) -> None:
        """Load a part of a version. The trainer's first rank calls it while `load` runs. Returns when the part is
        loaded."""
        await self._engine.deliver(part)

    async def sleep(self) -> None:
        """Leave the device to the trainer."""
        await self._engine.sleep()
        self._phases.enter(ASLEEP)

    async def wake(self) -> None:
        await self._engine.wake()
        self._phases.enter(SERVING)

    async def try_threads(self, counts: Sequence[int], num_groups: int) -> dict[int, float]:
        """Measure seconds per token for each number of threads, with so many groups decoded together."""
        seed, policy = 0 if self._spec.engine.config.sampling.seeded else None, self._spec.engine.first_policy
        return await seconds_per_token(self._engine, counts, num_groups, self._spec.group_size, seed, policy)

    async def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from now on."""
        await self._engine.use_threads(num_threads)

    async def numerics(self) -> dict[str, Any]:
        """Return what decides the bits that this process computes."""
        return await asyncio.to_thread(numerics)

    async def version(self) -> int:
        return await self._engine.version()

    async def progress(self) -> Progress:
        """Tokens sampled, and samples in flight. May be called at any time."""
        sampled = self._engine.sampled()
        return self._phases.progress(sampled.num_tokens, sampled.num_in_flight, sampled.tokens_in_flight)

    async def kv_load(self) -> KvLoad | None:
        """The load of the engine's KV memory. May be called at any time."""
        return self._engine.kv_load()

    async def stats(self) -> dict[str, float]:
        """Counters of the sampled rollouts, which the environments report for an engine that pulls none, of what new
        weights have cost it, and of drafted tokens."""
        sampled = self._engine.sampled()
        counts = {PAUSED: sampled.paused_s, READ_AGAIN: float(sampled.num_read_again)}
        counts |= {DRAFTED: float(sampled.num_drafted), ACCEPTED: float(sampled.num_accepted)}
        return counts | (self._workers[0].stats() if self._spec.pulls else {})

    async def close(self) -> None:
        await self._meter.close()
        await self._engine.close()
