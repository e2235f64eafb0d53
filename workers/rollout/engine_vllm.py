"""The rollout engine on vLLM's `AsyncLLM`, for GPUs and for vLLM's CPU build.

    generate ─▶ one request for the n samples of a group, log-probabilities under the sampling distribution
    load     ─▶ open ▸ prepare ▸ verify ▸ pause ▸ start ▸ load ▸ finish ▸ version ▸ resume, each with a deadline;
                up to `verify` it continues to generate, and sequences are kept
    deliver  ─▶ where weights are streamed: the parts that `load` loads, from the trainer
    sleep    ─▶ on a GPU that others use meanwhile: weights are discarded, and nothing of them is in host memory;
                after `wake` nothing is sampled before `load` has brought weights

Sequences in flight during a load are preempted and recomputed: their next tokens are sampled as if the new weights had
read the whole prefix, and no key or value of old weights is read again. vLLM itself reports which token was sampled
under which version. The engine process and its workers are children of this process (`vllm_processes.py`). vLLM is
imported in `start`. Adapters: `engine_vllm_adapter.py` where they are published, `engine_vllm_named.py`.

Conversion of requests for samples from adapters to vLLM's terms and back. Importing this module does not import
vLLM.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.conf.errors import DataError, PenstockError, UnknownAdapter, WeightError
from penstock.metering.meters import Meters
from penstock.metering.table import BESIDE, ROLLOUT_LOAD_PHASES
from penstock.workers.calls.sample_calls import SampleCall, SampledTokens, SampleOutput, TopTokens
from penstock.workers.calls.training_calls import WHOLE
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.pictures.processor import check_seen
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampled, Sampling
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.prompt_scores import PromptScores, asks_of_prompt, check_call, room_after
from penstock.workers.rollout.vllm_conversion import (
    Opened,
    completion_of,
    discards_weights,
    init_request,
    outputs_of,
    sampled_so_far,
    sampling_params,
    shares_gpu,
    update_request,
)
from penstock.workers.rollout.vllm_pictures import prompt_of
from penstock.workers.rollout.vllm_processes import PHASE_KEY, VllmProcesses
from penstock.workers.routed_experts import RoutingShape
from penstock.workers.weights.publication.reading import mapped_publication
from penstock.workers.weights.streaming.engine_calls import Inbox
from penstock.workers.weights.transport import Delivery, Info, Part

MOST_SCORES = 1 << 20
"""Most log-probabilities of a prompt, tokens times vocabulary, that are brought here from an engine that cannot choose
those that are asked for."""


@dataclass(frozen=True)
class SampleAsker:
    """One call, as vLLM is asked it."""

    call: SampleCall
    vocabulary: int
    chooses: bool
    """True if the engine can score tokens of a prompt that it is told (vLLM's second model runner, which needs
    Triton)."""
    detokenizer: Detokenizer = NO_TOKENIZER

    def samples(self, banned: Sequence[int], num_samples: int | None = None) -> Any:
        """vLLM's parameters for the samples. `banned`: tokens that are never sampled."""
        made = sampling_params(num_samples or self.call.num_samples, self.call.sampling, banned, self.detokenizer)
        made.stop_token_ids = sorted({*self.call.stop_ids, *made.stop_token_ids})
        made.logprobs = min(self.call.topk_logprobs, self.vocabulary)
        return made

    def scored(self, banned: Sequence[int]) -> Any:
        """vLLM's parameters for the scores of the prompt: with the sample, if it is the only one, otherwise with one
        token. Raises `DataError`."""
        call, ids = self.call, self.call.target_prompt_ids
        if call.num_samples > 1:
            call = replace(call, sampling=replace(call.sampling, max_tokens=1))
        made = replace(self, call=call).samples(banned, 1)
        made.skip_reading_prefix_cache = True
        if call.prompt_logprobs or call.topk_prompt_logprobs:
            made.prompt_logprobs = min(call.topk_prompt_logprobs, self.vocabulary)
        if ids is None or not ids.size:
            return made
        if self.chooses:
            made.prompt_logprob_token_ids = ids.astype(np.int32)
        elif len(call.prompt_ids) * self.vocabulary <= MOST_SCORES:
            made.prompt_logprobs = -1
        else:
            raise DataError(
                f"target_prompt_ids: vLLM without Triton, as on a CPU, scores no chosen tokens of a prompt, and has to "
                f"tell of its whole vocabulary: {len(call.prompt_ids)} tokens times {self.vocabulary} are more than "
                f"{MOST_SCORES}. Set rollout.engine=hf."
            )
        return made

    def scores_of(self, output: Any) -> PromptScores:
        """What vLLM says of the prompt. It has for each position the token itself, then the likeliest ones."""
        call, ids, flat = self.call, self.call.target_prompt_ids, output.prompt_logprobs
        num_tokens, num_top = len(call.prompt_ids), min(call.topk_prompt_logprobs, self.vocabulary)
        chosen = np.full(num_tokens, np.nan, np.float32)
        top_ids, top = np.zeros((num_tokens, num_top), np.int32), np.zeros((num_tokens, num_top), np.float32)
        targets = None if ids is None else np.zeros(ids.shape, np.float32)
        for position in range(1, num_tokens if flat is not None else 0):
            first, end = flat.start_indices[position], flat.end_indices[position]
            chosen[position] = flat.logprobs[first]
            top_ids[position] = flat.token_ids[first + 1 : first + 1 + num_top]
            top[position] = flat.logprobs[first + 1 : first + 1 + num_top]
            if ids is not None and targets is not None and not self.chooses:
                every = np.zeros(self.vocabulary, np.float32)
                every[flat.token_ids[first + 1 : end]] = flat.logprobs[first + 1 : end]
                targets[position - 1] = np.where(ids[position - 1] < 0, 0, every[ids[position - 1]])
        if ids is not None and ids.size and self.chooses:
            targets = np.where(ids < 0, np.float32(0), output.prompt_token_id_logprobs)
        return PromptScores(
            chosen if call.prompt_logprobs else None, TopTokens(top_ids, top) if num_top else None, targets
        )  # fmt: skip

    def sampled(self, output: Any) -> list[SampledTokens]:
        return [self.sampled_of(sample) for sample in outputs_of(output, self.call.num_samples)]

    def sampled_of(self, sample: Any) -> SampledTokens:
        """One sample of a request, with the likeliest tokens at each of its positions."""
        flat, length, num_top = sample.logprobs, len(sample.token_ids), min(self.call.topk_logprobs, self.vocabulary)
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        top = None
        if num_top:
            places = np.array(flat.start_indices)[:, None] + 1 + np.arange(num_top)
            ids, values = np.array(flat.token_ids, np.int32)[places], np.array(flat.logprobs, np.float32)[places]
            top = TopTokens(ids.reshape(length, num_top), values.reshape(length, num_top))
        return SampledTokens(list(sample.token_ids), logprobs, sample.finish_reason, top)


T = TypeVar("T")
Parameters = Callable[[Sequence[int]], Any]
"""Function that makes vLLM's parameters of a request, from the tokens that are never sampled."""

WARMUP_SAMPLES = 8
WARMUP_TOKENS = 4


class VllmEngine(VllmProcesses):
    """Lifecycle: `start` once; then `generate` and `load` in any order and concurrency; `close`.

    A load either ends with the new version asserted, or leaves the old weights serving (failures up to `start`), or
    marks the engine broken (later failures): then every call raises `WorkerDied` and its owner starts another. It never
    serves weights that it does not know.
    """

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        super().__init__(spec, meters)
        self._version = spec.version
        self._inbox = Inbox(spec.phase_timeout_s)
        self._detokenizer = NO_TOKENIZER
        self._routing: RoutingShape | None = None
        self._request_ids, self.num_in_flight = itertools.count(), 0
        self._num_tokens = 0
        """Tokens of requests that have ended."""
        self._admission = asyncio.Event()
        self._admission.set()
        self._loading = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._has_memory = self._has_weights = True
        """Whether the device has memory for the weights, and whether their values are there, or are kept by vLLM."""
        self._has_loaded = self._wakes = False
        """Whether a publication was loaded, and whether `wake` waits for the next one."""
        self.phase_seconds: dict[str, float] = {}
        """Seconds of each phase of the last load."""

    async def start(self) -> None:
        """Start the engine process and warm it up. Raises `ResourceError` when it does not come up,
        `DeadlineExceeded`."""
        await self._in_time("start", self._create(), self._config.start_timeout_s, "rollout.start_timeout_s")
        await self._in_time("warm-up", self._warm_up(), self._config.start_timeout_s, "rollout.start_timeout_s")

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        """Sample the responses to a prompt. Raises `PromptRefused` for a prompt that leaves no room for a response,
        `DataError` for another request that vLLM does not take, and for pictures that do not belong to the prompt or
        that the model cannot see, `WorkerDied` when the engine is gone."""
        parameters = partial(sampling_params, num_samples, sampling, detokenizer=self._detokenizer)
        output = await self._answer(prompt_ids, pictures, parameters, self._lora_request(), sampling.priority)
        finished = partial(completion_of, detokenized=bool(sampling.stop), routing=self._routing)
        return [finished(sample, self._detokenizer) for sample in outputs_of(output, num_samples)]

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, as `AdapterEngine` says it. For several samples the prompt is scored by a request of
        its own: with them, vLLM would read it anew for each."""
        self.check_alive()
        vocabulary = self.llm.model_config.get_vocab_size()
        check_call(call, vocabulary)
        ask = SampleAsker(call, vocabulary, self.llm.vllm_config.use_v2_model_runner, self._detokenizer)
        scores, output = PromptScores(), None
        async with self._adapter_in_use(adapter) as lora:
            answer = partial(self._answer, call.prompt_ids, call.pictures, lora=lora, priority=call.sampling.priority)
            if asks_of_prompt(call):
                output = await answer(ask.scored)
                scores = ask.scores_of(output)
            if output is None or call.num_samples > 1:
                output = await answer(ask.samples)
        return SampleOutput(ask.sampled(output), scores.logprobs, scores.top, scores.targets)

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None) -> AsyncIterator[Any]:
        """vLLM's request for an adapter, which stays there within the block. Raises `UnknownAdapter`."""
        if name is not None:
            raise UnknownAdapter(f"adapter {name!r}: this engine was started without room for adapters by name.")
        yield self._lora_request()

    async def load(self, delivery: Delivery) -> None:
        """Load a publication; or the parts of a streamed version, which `deliver` brings meanwhile.

        A publication's file stays mapped here, and so locked, until its bytes are loaded: what was verified is what is
        loaded, and no writer takes the file meanwhile. Raises `WeightError`, `DeadlineExceeded` (naming the phase),
        `WorkerDied`.
        """
        self.check_alive()
        async with self._loading:
            self.phase_seconds = {}
            opened = await self._open(delivery) if isinstance(delivery, Publication) else None
            self._admission.clear()
            try:
                if not self._has_memory:
                    await self._phase(delivery, "wake", self._wake_weights())
                await self._exchange(delivery, opened)
                self._has_weights = self._has_loaded = True
                if self._wakes:
                    await self.wake()
            except PenstockError as error:
                self._inbox.refuse(delivery.version, error)
                raise
            finally:
                self._admission.set()

    async def connect(self, init_info: Info) -> None:
        """Connect to the trainer, where weights are streamed. Returns when both are connected; raises as `load`
        does."""
        self.check_alive()
        call = self.llm.init_weight_transfer_engine(init_request(init_info))
        await self._in_time("connecting to the trainer", call, self._spec.phase_timeout_s, PHASE_KEY)

    async def deliver(self, part: Part) -> None:
        """Take a part of a streamed version; returns when it is loaded, or raises why not."""
        self.check_alive()
        await self._inbox.put(part)

    async def sleep(self) -> None:
        """Leave the device. On a shared GPU, weights and KV cache are discarded (vLLM's level 2); requests in flight
        wait in vLLM, and are recomputed once the engine is awake. Where nobody brings the weights again, as beside
        adapters and where they are streamed, they go to the host's memory (level 1). A CPU has nothing to give back."""
        self.check_alive()
        self._awake.clear()
        self._wakes = False
        if shares_gpu(self._config):
            self._has_memory, self._has_weights = False, not discards_weights(self._spec)
            level = 1 if self._has_weights else 2
            call = self.llm.sleep(level=level, mode="keep")  # by default vLLM ends what is in flight
            await self._in_time("sleep", call, self._spec.phase_timeout_s, PHASE_KEY)

    async def wake(self) -> None:
        """Take the device again. Where weights were discarded, the next `load` ends the waking; before there is a
        publication, they are read from the model's files."""
        self.check_alive()
        if shares_gpu(self._config):
            if not self._has_weights and self._has_loaded:
                self._wakes = True
                return
            if not self._has_weights:
                await self._in_time(
                    "reading the model again", self._read_again(), self._spec.phase_timeout_s, PHASE_KEY
                )
            tags = ["kv_cache"] if self._has_memory else None
            await self._in_time("wake", self.llm.wake_up(tags), self._spec.phase_timeout_s, PHASE_KEY)
        self._has_memory, self._wakes = True, False
        self._awake.set()

    async def _wake_weights(self) -> None:
        """Bring back the memory of the weights, while the trainer still has the rest of the device."""
        await self.llm.wake_up(["weights"])
        self._has_memory = True

    async def _read_again(self) -> None:
        """Load the weights that the engine started with."""
        if not self._has_memory:
            await self._wake_weights()
        await self.llm.collective_rpc("reload_weights")
        self._has_weights = True

    async def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from the next decode step on. For the CPU build."""
        self.check_alive()
        call = self.llm.collective_rpc("use_threads", args=(num_threads,))
        await self._in_time(f"use of {num_threads} threads", call, self._spec.phase_timeout_s, PHASE_KEY)

    async def version(self) -> int:
        """The version that the engine process reports."""
        self.check_alive()
        return int(await self.llm.get_weight_version())

    def sampled(self) -> Sampled:
        now = sampled_so_far(self.llm.output_processor) if self.llm is not None else Sampled(0, 0)
        waiting = min(self._stats.num_waiting, now.num_in_flight) if self._stats is not None else 0
        return Sampled(self._num_tokens + now.num_tokens, now.num_in_flight, now.num_tokens, waiting)

    # Start

    async def _create(self) -> None:
        if self._config.router_replay:
            self._routing = await asyncio.to_thread(RoutingShape.of_path, self._spec.model_path)
        await asyncio.to_thread(self._build)
        self._detokenizer = Detokenizer(self.llm.get_tokenizer())
        await self.llm.update_weight_version(str(self._version))

    async def _warm_up(self) -> None:
        """Run the first request with log-probabilities and the first seeded one, each of which compiles a kernel for
        seconds."""
        room = self._config.max_model_len - 1
        for seed in (None, 0):
            sampling = Sampling(max_tokens=min(WARMUP_TOKENS, room), ignore_eos=True, seed=seed)
            await self.generate([0], WARMUP_SAMPLES, sampling)

    # Generation

    async def _prompt(self, prompt_ids: list[int], pictures: PromptPictures | None) -> Any:
        """vLLM's form of a prompt. Features of pictures are computed in a thread."""
        check_seen(self._pictures, pictures, self._config.max_pictures, self._spec.model_path)
        if self._pictures is None:
            return {"prompt_token_ids": prompt_ids}
        return await asyncio.to_thread(prompt_of, self._pictures, prompt_ids, pictures)

    async def _answer(
        self,
        prompt_ids: Sequence[int],
        pictures: PromptPictures | None,
        parameters: Parameters,
        lora: Any,
        priority: int,
    ) -> Any:
        """vLLM's output for one request, once the engine is awake and loads nothing."""
        self.check_alive()
        room_after(prompt_ids, self._config.max_model_len)
        prompt = await self._prompt(list(prompt_ids), pictures)
        await self._awake.wait()
        while not self._admission.is_set():  # another load may have begun between the event and this task's turn
            await self._admission.wait()
        self.check_alive()
        self.num_in_flight += 1
        try:
            output = await self._request(prompt, parameters, lora, priority)
        finally:
            self.num_in_flight -= 1
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        return output

    async def _request(self, prompt: Any, parameters: Parameters, lora: Any, priority: int) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id = str(next(self._request_ids))
        output = None
        try:
            banned = () if self._pictures is None else self._pictures.token_ids
            async for latest in self.llm.generate(
                prompt, parameters(banned), request_id=request_id, lora_request=lora, priority=priority
            ):
                output = latest
        except EngineDeadError as error:
            raise self._died(error) from None
        except EngineGenerateError as error:  # while it lives, it is this request's alone
            if self._is_gone():
                raise self._died(error.__cause__ or error) from None
            await self.llm.abort(request_id)  # else vLLM keeps what it has noted of it
            raise DataError(f"vLLM cannot take the request: {error.__cause__!r:.300}") from None
        except (ValueError, VLLMClientError) as error:  # such as a schema or a grammar that cannot be followed
            raise DataError(f"vLLM refuses the request: {error}") from None
        reasons = {sample.finish_reason for sample in output.outputs} if output is not None else {"nothing"}
        if "error" in reasons and not self._is_gone():  # such as a grammar that the engine cannot compile
            raise DataError("vLLM ended the request with an error of its own; its log says more.")
        if not reasons <= {"stop", "length"}:
            raise self._died("it ended a request without finishing it")
        return output

    def _lora_request(self) -> Any:
        """vLLM's request for the adapter that a request is to have; None for no adapter."""
        return None

    # Loading

    async def _open(self, publication: Publication) -> Opened:
        """Do all that can be done before the engine pauses: map the file here and in the engine's processes, verify
        it."""
        info = {"directory": publication.directory, "version": publication.version}
        mapped = await self._phase(publication, "open", asyncio.to_thread(mapped_publication, publication))
        await self._phase(publication, "prepare", self.llm.init_weight_transfer_engine(init_request(info)))
        await self._phase(publication, "verify", asyncio.to_thread(mapped.verify))
        return Opened(mapped, info | {"verified_inode": mapped.inode})

    async def _exchange(self, delivery: Delivery, opened: Opened | None) -> None:
        """Swap the weights while nothing is scheduled. Requests that arrive meanwhile wait at `_admission`. vLLM is
        paused already while it sleeps, and goes on when it wakes."""
        version = str(delivery.version)
        paused = self.num_in_flight > 0 and (self._awake.is_set() or not shares_gpu(self._config))
        if paused:
            await self._pause(delivery)
        try:
            if not paused:  # nobody to preempt: all there is to do is to drop the prefixes cached under the old weights
                await self._phase(delivery, "pause", self.llm.reset_prefix_cache())
                if self._pictures is not None and not self._keeps_seen:  # and what they have seen in pictures
                    await self._phase(delivery, "pause", self.llm.reset_encoder_cache())
            await self._begin(delivery)
        except PenstockError:
            if paused:
                await self._resume(delivery)
            raise
        try:
            async with self._loaded(delivery, opened):
                await self._finish(delivery)
                served = await self._phase(delivery, "version", self.llm.get_weight_version())
                if served != version:
                    raise WeightError(f"weight sync to version {version}: the engine says it serves {served!r}.")
        except PenstockError as error:
            self._broken = str(error)
            raise
        if paused:
            await self._resume(delivery)
        self._version = delivery.version

    @asynccontextmanager
    async def _loaded(self, delivery: Delivery, opened: Opened | None) -> AsyncIterator[None]:
        """Load all weights before the block. A sender is told of the end only once the version has been asserted as
        well."""
        if opened is not None:
            await self._load_part(delivery, opened.info)
            yield
        else:
            assert not isinstance(delivery, Publication)
            async with self._inbox.received(delivery, partial(self._load_part, delivery)):
                yield

    async def _begin(self, delivery: Delivery) -> None:
        await self._phase(delivery, "start", self.llm.start_weight_update())

    async def _finish(self, delivery: Delivery) -> None:
        call = self.llm.finish_weight_update(weight_version=str(delivery.version))
        await self._phase(delivery, "finish", call)

    async def _load_part(self, delivery: Delivery, info: Info) -> None:
        await self._phase(delivery, "load", self.llm.update_weights(update_request(info)))

    @property
    def _keeps_seen(self) -> bool:
        """True if what has been seen in pictures is what the next version would see, too."""
        return self._pictures is not None and self._spec.tower_is_frozen

    async def _pause(self, delivery: Delivery) -> None:
        keeps = self._keeps_seen
        try:
            await self._phase(delivery, "pause", self.llm.pause_generation(mode="keep", clear_cache=not keeps))
            if keeps:
                await self._phase(delivery, "pause", self.llm.reset_prefix_cache(reset_running_requests=True))
        except PenstockError:
            await self._resume(delivery)
            raise

    async def _resume(self, delivery: Delivery) -> None:
        try:
            await self._phase(delivery, "resume", self.llm.resume_generation())
        except PenstockError as error:
            self._broken = str(error)
            raise

    async def _phase(self, delivery: Delivery, name: str, call: Awaitable[T]) -> T:
        phase = f"weight sync to version {delivery.version}, phase {name}"
        start = time.perf_counter()
        result = await self._in_time(phase, call, self._spec.phase_timeout_s, PHASE_KEY)
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        if self._meters is not None:
            self._meters.add(ROLLOUT_LOAD_PHASES, seconds, phase="beside" if name in BESIDE else "paused")
        return result


def make(spec: EngineSpec, meters: Meters | None = None) -> VllmEngine:
    """Make the engine for what is published and served: whole models or one adapter, and adapters by name. `meters`:
    for vLLM's own statistics."""
    if spec.adapters is not None and spec.adapters.max_rank == WHOLE:
        from penstock.workers.rollout.engine_vllm_whole import VllmWholeEngine

        return VllmWholeEngine(spec, meters)
    if spec.adapters is not None:
        from penstock.workers.rollout.engine_vllm_named import VllmNamedEngine

        return VllmNamedEngine(spec, meters)
    if spec.adapter is not None:
        from penstock.workers.rollout.engine_vllm_adapter import VllmAdapterEngine

        return VllmAdapterEngine(spec, meters)
    return VllmEngine(spec, meters)
