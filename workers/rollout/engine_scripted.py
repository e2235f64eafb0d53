"""A rollout engine without a model: deterministic tokens, and simulated time.

Takes the place of a real engine in tests of the loops around it and in simulations with many workers: it costs one
timer a group, imports neither torch nor vLLM, and keeps the contract of `RolloutEngine`, versions of tokens in flight
included.
"""

import asyncio
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.conf.errors import WorkerDied
from penstock.metering.meters import Meters
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, EngineSpec, KvLoad, Publication, Sampling, SamplingProgress
from penstock.workers.rollout.scripted_memory import MemoryModel, MemoryScheduler

Length = Callable[[Sequence[int], int], int]
"""Function from `(prompt_ids, sample_index)` to the number of response tokens."""


@dataclass(frozen=True)
class TimeModel:
    """Durations of the engine's work. By default it takes no time at all."""

    latency_s: float = 0.0
    """Seconds from the request to its first token."""
    tokens_per_s: float = math.inf
    """Decoding rate of one sequence."""
    load_s: float = 0.0
    """Seconds to load new weights; sequences in flight continue meanwhile, under the old weights."""


class ScriptedEngine:
    """An engine whose token j of sample i is a hash of prompt, seed + i and j (greedy: of prompt and j). Responses are
    never right answers.

        engine = ScriptedEngine(TimeModel(tokens_per_s=100), length=lambda prompt, sample: 10 * (sample + 1))
    """

    def __init__(
        self,
        time_model: TimeModel | None = None,
        *,
        length: Length | None = None,
        vocab_size: int = 96,
        version: int = 0,
        memory: MemoryModel | None = None,
    ) -> None:
        """`length`: response tokens, capped by `max_tokens`; default: `max_tokens` always. Ids are below
        `vocab_size`. `memory`: what it decodes in, which then decides how long it takes; None: there is no limit."""
        self._time = time_model or TimeModel()
        self._length = length
        self._vocab_size = vocab_size
        self._versions = [version]
        self._since = [-math.inf]
        self._num_tokens = 0
        self._in_flight: dict[object, tuple[float, list[int]]] = {}
        """Time when a group began, and the lengths of its samples."""
        self._scheduler = None if memory is None else MemoryScheduler(memory, lambda: self._versions[-1])
        self._closed = False
        self._awake = asyncio.Event()
        self._awake.set()

    async def start(self) -> None: ...

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        """Sample the responses to a prompt; its pictures are ignored. Raises `WorkerDied` once closed."""
        self._check_open()
        await self._awake.wait()
        started = asyncio.get_running_loop().time() + self._time.latency_s
        lengths = [self._length_of(prompt_ids, index, sampling) for index in range(num_samples)]
        completions = [self._complete(prompt_ids, index, lengths[index], sampling) for index in range(num_samples)]
        group = object()
        self._in_flight[group] = started, lengths
        try:
            if self._scheduler is None:
                await asyncio.sleep(self._time.latency_s + max(lengths) / self._time.tokens_per_s)
                completions = [self._dated(one, started) for one in completions]
            else:
                completions = await self._scheduled(prompt_ids, completions, sampling, self._scheduler)
        finally:
            del self._in_flight[group]
        self._check_open()
        self._num_tokens += sum(lengths)
        return completions

    def kv_load(self) -> KvLoad | None:
        return self._scheduler.load() if self._scheduler is not None else None

    async def load(self, publication: Publication) -> None:
        self._check_open()
        await asyncio.sleep(self._time.load_s)
        if self._scheduler is not None:
            self._scheduler.cache.forget()
        self._versions.append(publication.version)
        self._since.append(asyncio.get_running_loop().time())

    async def nonfinite_weights(self) -> list[str]:
        return []

    async def sleep(self) -> None:
        self._check_open()
        self._awake.clear()

    async def wake(self) -> None:
        self._check_open()
        self._awake.set()

    async def version(self) -> int:
        self._check_open()
        return self._versions[-1]

    def sampled(self) -> SamplingProgress:
        now = asyncio.get_running_loop().time()
        groups = [
            [self._so_far(length, now - started) for length in lengths] for started, lengths in self._in_flight.values()
        ]
        so_far = sum(map(sum, groups))
        return SamplingProgress(self._num_tokens + so_far, sum(map(len, groups)), so_far)

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerDied("the scripted engine is closed; start another one.")

    def _so_far(self, length: int, seconds: float) -> int:
        """Tokens so far of a sample that has run for so many seconds."""
        return int(min(length, seconds * self._time.tokens_per_s)) if seconds > 0 else 0

    def _length_of(self, prompt_ids: Sequence[int], index: int, sampling: Sampling) -> int:
        if self._length is None:
            return sampling.max_tokens
        return min(sampling.max_tokens, max(0, self._length(prompt_ids, index if sampling.temperature else 0)))

    async def _scheduled(
        self, prompt_ids: Sequence[int], completions: Sequence[Completion], sampling: Sampling, by: MemoryScheduler
    ) -> list[Completion]:
        """The completions once the memory has had room for them."""
        calls = (by.answer(prompt_ids, completion.token_ids, sampling.priority) for completion in completions)
        requests = await asyncio.gather(*calls)
        return [
            replace(completion, versions=request.versions, num_cached=request.num_cached)
            for completion, request in zip(completions, requests, strict=True)
        ]

    def _dated(self, completion: Completion, started: float) -> Completion:
        """The completion with the versions of tokens that are sampled at an even rate from `started` on."""
        step_s = 1 / self._time.tokens_per_s
        times = (started + j * step_s for j in range(len(completion.token_ids)))
        return replace(completion, versions=[self._versions[bisect_right(self._since, at) - 1] for at in times])

    def _complete(self, prompt_ids: Sequence[int], index: int, num_tokens: int, sampling: Sampling) -> Completion:
        seed = "greedy" if sampling.temperature == 0 else (sampling.seed or 0) + index
        token_ids = self._tokens(f"{list(prompt_ids)}/{seed}", num_tokens)
        logprob = 0.0 if sampling.temperature == 0 else -math.log(self._vocab_size)
        reason = "length" if num_tokens == sampling.max_tokens else "stop"
        return Completion(token_ids, [logprob] * num_tokens, [], " ".join(map(str, token_ids)), reason)

    def _tokens(self, key: str, num_tokens: int) -> list[int]:
        stream = hashlib.shake_128(key.encode()).digest(4 * num_tokens)
        return [int.from_bytes(stream[4 * j : 4 * j + 4], "little") % self._vocab_size for j in range(num_tokens)]


def make(spec: EngineSpec, meters: Meters | None = None) -> ScriptedEngine:
    """Make the engine with the times of `rollout.scripted`. It has no statistics of its own for `meters`."""
    speed = spec.config.scripted
    times = TimeModel(speed.latency_s, speed.tokens_per_s or math.inf, speed.load_s)
    return ScriptedEngine(times, version=spec.version)
