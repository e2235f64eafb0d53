"""The rollout engine on vLLM's `AsyncLLM`, for GPUs and for vLLM's CPU build.

    generate ─▶ one request for the n samples of a group, log-probabilities under the sampling distribution
    load     ─▶ open ▸ prepare ▸ verify ▸ pause ▸ start ▸ load ▸ finish ▸ version ▸ resume, each with a deadline;
                up to `verify` it continues to generate, and sequences are kept; an engine that drafted tokens make
                slower begins again without them before (`speculation.py`)
    deliver  ─▶ where weights are streamed: the parts that `load` loads, from the trainer
    sleep    ─▶ on a GPU that a trainer uses meanwhile: weights are discarded, and none are kept in host memory;
                after `wake` nothing is sampled before `load` has brought weights

Sequences in flight during a load are preempted and recomputed: their next tokens are sampled as if the new weights had
read the whole prefix, and no key or value of old weights is read again. With `rollout.on_update=keep` they keep theirs,
which a prefix cache cannot forget meanwhile: each prompt's version is the salt of its cached blocks, so that no later
one finds them. vLLM itself reports which token was sampled under which version. Engines that serve adapters are in
`engine_vllm_adapters.py`.

The file has the engine, then the conversion to vLLM's terms and back, then the start of its processes, whose output is
in `engine_output.py`. Importing it does not import vLLM, which is imported when an engine starts.
"""

import asyncio
import gc
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    ModelError,
    PenstockError,
    ResourceError,
    UnknownAdapter,
    WeightError,
    WorkerDied,
    how_ended,
)
from penstock.conf.rollout import RolloutConfig
from penstock.conf.secret import reveal
from penstock.conf.weights import STREAMS
from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.workers.models.routed_experts import RoutingShape
from penstock.workers.pictures.processor import Family, PictureProcessor, check_pictures, hash_of
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import (
    WHOLE,
    Completion,
    EngineSpec,
    KvLoad,
    Publication,
    SampleCall,
    SampledTokens,
    SampleOutput,
    Sampling,
    SamplingProgress,
    TopTokens,
)
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.engine_output import EngineOutput, failure_message
from penstock.workers.rollout.kept_sequences import IMAGE, salted, single_samples, unread_requests
from penstock.workers.rollout.prompt_scores import PromptScores, check_call, needs_prompt_scores, response_room
from penstock.workers.rollout.speculation import DraftTrial, draft_arguments, without_drafts
from penstock.workers.runtime.async_tasks import BusyClock, cancel_all
from penstock.workers.runtime.processes import SETTINGS, compiled_folder
from penstock.workers.weights.engine_calls import Delivery, Inbox, Info, StreamPart
from penstock.workers.weights.publication.publication_files import MappedWeights
from penstock.workers.weights.vllm.plugin import BACKEND, IPC_BACKEND

T = TypeVar("T")
PHASE_KEY, START_KEY = "weights.phase_timeout_s", "rollout.start_timeout_s"
COMPILE_KEY = "rollout.compile_timeout_s"
VLLM_READY_S = 600
"""Seconds that vLLM itself waits for its engine process, unless it is told otherwise."""
DRAIN_LOOK_S = 0.05
"""Seconds between two looks at samples that are to end before an engine begins again."""
WARMUP_SAMPLES = 8
WARMUP_TOKENS = 4
MOST_SCORES = 1 << 20
"""Most log-probabilities of a prompt, tokens times vocabulary, that are brought here from an engine that cannot choose
those that are asked for."""
MOST_WHOLE = 1 << 17
"""The same for scores of the whole vocabulary at a few tokens, which bring those of all others along."""
CPU_BATCHED_TOKENS = 4096
"""Most prompt tokens of one step of the CPU engine; prompts beyond them wait for the next, whole."""
CPU_BLOCK_TOKENS = 32
"""Tokens in a KV block on the CPU: the smallest that its kernels like, so that short prompts are shared in a group."""
LORA_RANKS = ROLLOUT_ENGINES["vllm"].lora_ranks
WORKER_CALLS = "penstock.workers.weights.vllm.backends.WorkerCalls"
WORKER_WITH_HEADS = "penstock.workers.rollout.vllm_heads.WorkerWithHeads"
BACKENDS = {"shm": BACKEND, "ipc": IPC_BACKEND}
"""vLLM's names of weight-transfer backends, where they differ from `weights.transport`."""


class VllmEngine:
    """Lifecycle: `start` once; then `generate` and `load` in any order and concurrency; `close`.

    A load either ends with the new version asserted, or leaves the old weights serving (failures up to `start`), or
    marks the engine broken (later failures): then every call raises `WorkerDied` and its owner starts another. It never
    serves weights that it does not know.
    """

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        """`meters`: for vLLM's statistics after each step; None: it gathers none."""
        self._spec, self._config, self._meters = spec, spec.config, meters
        self.llm: Any = None
        """vLLM's own engine, from `start` to `close`."""
        self._children: list[BaseProcess] = []
        self._output = EngineOutput()
        self._broken: str | None = None
        """The reason why the engine is broken."""
        is_counted = meters is not None or spec.by_priority or spec.config.speculation.is_on
        self._drafts = DraftTrial()
        self._stats = VllmStats(meters or Meters(), self._drafts) if is_counted else None
        self._pictures: PictureProcessor | None = None
        """Processor of the model's pictures; None for a model of text."""
        self._detokenizer = NO_TOKENIZER
        self._routing: RoutingShape | None = None
        self._version = spec.version
        self._request_ids, self.num_in_flight = itertools.count(), 0
        self._num_tokens = 0
        """Tokens of requests that have ended."""
        self._paused = BusyClock()
        """Seconds in which sequences stood still while weights were exchanged."""
        self._restarted: set[str] = set()
        """Requests that were given up to begin anew under new weights."""
        self._has_begun = asyncio.Event()
        self._has_begun.set()
        """Set but while the engine begins again."""
        self._inbox = Inbox(spec.phase_timeout_s)
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
        """Start the engine process and warm it up; with drafts once without them before, to know what they cost. Raises
        `ResourceError` when it does not come up, `DeadlineExceeded`."""
        if self._config.speculation.is_on:
            await self._drafts.run(self._spec, self._start, self._repeat)
        else:
            await self._start(self._spec)

    async def _start(self, spec: EngineSpec) -> None:
        """Start vLLM's processes, after the end of those that there are."""
        await self._end()
        self._spec, self._config, self._output = spec, spec.config, EngineOutput()
        compiles = "" if self._config.enforce_eager else f" + {COMPILE_KEY}"
        await self._in_time("start", self._create(), self._config.engine_start_s, START_KEY + compiles)
        await self._in_time("warm-up", self._warm_up(), self._config.start_timeout_s, START_KEY)

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        """Sample the responses to a prompt. Raises `PromptRefused` for a prompt that leaves no room for a response,
        `DataError` for another request that vLLM does not take, and for pictures that do not belong to the prompt or
        that the model cannot see, `WorkerDied` when the engine is gone."""
        parameters = sampling_params(num_samples, sampling, self._banned, self._detokenizer)
        lora = self._lora_request(sampling.policy)
        output = await self._answer(prompt_ids, pictures, parameters, lora, sampling.priority)
        finished = partial(to_completion, detokenized=bool(sampling.stop), routing=self._routing)
        completions = [finished(sample, self._detokenizer) for sample in samples_of_output(output, num_samples)]
        return [replace(one, num_cached=output.num_cached_tokens) for one in completions]

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, as `AdapterEngine` says it. For several samples the prompt is scored by a request of
        its own: with them, vLLM would read it anew for each."""
        await self._alive()
        vocabulary = self.llm.model_config.get_vocab_size()
        check_call(call, vocabulary)
        chooses = self.llm.vllm_config.use_v2_model_runner
        request = VllmRequest(call, vocabulary, chooses, self._banned, self._detokenizer)
        scores, output = PromptScores(call, vocabulary), None
        async with self._adapter_in_use(adapter, call.sampling.policy) as lora:
            answer = partial(self._answer, call.prompt_ids, call.pictures, lora=lora, priority=call.sampling.priority)
            if needs_prompt_scores(call):
                output = await answer(request.scored())
                request.fill(scores, output)
            if output is None or call.num_samples > 1:
                output = await answer(request.samples(call.num_samples))
        return scores.output([request.sampled(sample) for sample in samples_of_output(output, call.num_samples)])

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None, policy: str = "") -> AsyncIterator[Any]:
        """vLLM's request for an adapter by name, or a policy's, which stays there within the block. Raises
        `UnknownAdapter`."""
        if name is not None:
            raise UnknownAdapter(f"adapter {name!r}: this engine was started without room for adapters by name.")
        yield self._lora_request(policy)

    async def load(self, delivery: Delivery) -> None:
        """Load a publication; or the parts of a streamed version, which `deliver` brings meanwhile.

        A publication's file stays mapped here, and so locked, until its bytes are loaded: what was verified is what is
        loaded, and no writer takes the file meanwhile. Raises `WeightError`, `DeadlineExceeded` (naming the phase),
        `WorkerDied`.
        """
        self.check_alive()
        async with self._loading:
            self.phase_seconds = {}
            try:
                if self._drafts.are_slower() and await self._is_drained():
                    with self._breaking():  # its weights are those of `model_path`
                        await self._begin_again()
                        await self._load(delivery)
                else:
                    await self._load(delivery)
            finally:
                self._admission.set()

    async def _load(self, delivery: Delivery) -> None:
        mapped = await self._open(delivery) if isinstance(delivery, Publication) else None
        self._admission.clear()
        try:
            if not self._has_memory:
                await self._phase(delivery, "wake", self._wake_weights())
            await self._exchange(delivery, mapped)
            self._has_weights = self._has_loaded = True
            if self._wakes:
                await self.wake()
        except PenstockError as error:
            self._inbox.refuse(delivery.version, error)
            raise

    async def connect(self, init_info: Info) -> None:
        """Connect to the trainer, where weights are streamed. Returns when both are connected; raises as `load`
        does."""
        self.check_alive()
        await self._call("connecting to the trainer", self._announce(init_info))

    async def deliver(self, part: StreamPart) -> None:
        """Take a part of a streamed version; returns when it is loaded, or raises the error of the load."""
        self.check_alive()
        await self._inbox.put(part)

    async def sleep(self) -> None:
        """Leave the device. On a shared GPU, weights and KV cache are discarded (vLLM's level 2); requests in flight
        wait in vLLM, and are recomputed once the engine is awake. Where no
        publication brings the weights again, as beside adapters and where they are streamed, they go to the host's
        memory (level 1). A CPU has nothing to give back."""
        await self._alive()
        self._awake.clear()
        self._wakes = False
        if shares_gpu(self._config):
            self._has_memory, self._has_weights = False, not discards_weights(self._spec)
            level = 1 if self._has_weights else 2
            call = self.llm.sleep(level=level, mode="keep")  # by default vLLM ends what is in flight
            await self._call("sleep", call)

    async def wake(self) -> None:
        """Take the device again. Where weights were discarded, the next `load` ends the waking; before there is a
        publication, they are read from the model's files."""
        await self._alive()
        if shares_gpu(self._config):
            if not self._has_weights and self._has_loaded:
                self._wakes = True
                return
            if not self._has_weights:
                await self._call("reading the model again", self._read_again())
            tags = ["kv_cache"] if self._has_memory else None
            await self._call("wake", self.llm.wake_up(tags))
        self._has_memory, self._wakes = True, False
        self._awake.set()

    async def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from the next decode step on. For the CPU build."""
        await self._alive()
        call = self.llm.collective_rpc("use_threads", args=(num_threads,))
        await self._call(f"use of {num_threads} threads", call)
        self._spec = replace(self._spec, num_threads=num_threads)

    async def version(self) -> int:
        """The version that the engine process reports."""
        await self._alive()
        return int(await self.llm.get_weight_version())

    def sampled(self) -> SamplingProgress:
        now = sampling_progress(self.llm.output_processor) if self.llm is not None else SamplingProgress(0, 0)
        num_tokens, paused_s = self._num_tokens + now.num_tokens, self._paused.seconds()
        if self._stats is None:
            return SamplingProgress(num_tokens, now.num_in_flight, now.num_tokens, paused_s=paused_s)
        waiting, drafts = min(self._stats.num_waiting, now.num_in_flight), self._drafts.counts
        return SamplingProgress(
            num_tokens, now.num_in_flight, now.num_tokens, waiting, paused_s, self._stats.num_read_again,
            drafts.drafted, drafts.accepted,
        )  # fmt: skip

    def kv_load(self) -> KvLoad | None:
        if self.llm is None or self._stats is None:
            return None
        num_fitting = self.llm.vllm_config.cache_config.kv_cache_max_concurrency
        return self._stats.kv_load(num_fitting, self._config.max_model_len) if num_fitting else None

    async def nonfinite_weights(self) -> list[str]:
        await self._alive()
        call = self.llm.collective_rpc("nonfinite_weights")
        found = await self._call("a look at the weights", call)
        return sorted({name for names in found for name in names})

    async def close(self) -> None:
        self._broken = self._broken or "it was closed"
        await self._end()

    async def _end(self) -> None:
        """End vLLM's processes."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.shutdown()  # blocks on purpose: its output task must not run and report the end as a failure
            await asyncio.sleep(0.01)  # its cancelled tasks end
            del llm
            gc.collect()  # a cycle would keep it until the interpreter ends, when its __del__ prints an error

    # Start

    async def _create(self) -> None:
        if self._config.router_replay:
            self._routing = await asyncio.to_thread(RoutingShape.of_path, self._spec.model_path)
        await asyncio.to_thread(self._build)
        self._detokenizer = Detokenizer(self.llm.get_tokenizer())
        await self.llm.update_weight_version(str(self._version))

    def _build(self) -> None:
        """Start vLLM's processes. Raises `ResourceError`, and `ModelError` for weights that are not the model's."""
        others = multiprocessing.active_children()
        with self._output.captured(), vllm_environment(self._spec):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from penstock.workers.weights.checkpoint_form import check_model

            check_model(self._spec.model_path)
            try:
                self._pictures = PictureProcessor.of_or_none(self._spec.model_path, self._spec.picture_digest)
                family = self._pictures.family if self._pictures is not None else None
                arguments = AsyncEngineArgs(**engine_arguments(self._spec, family))
                loggers = [] if self._stats is None else [self._stats.logger]
                self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=cast(Any, loggers))
            except (RuntimeError, ValueError, OSError) as error:
                message = failure_message(str(error), self._output.tail())
                raise ResourceError(
                    f"the vLLM engine for {self._spec.model_path} did not start: {message}\nIts memory is set by "
                    "rollout.kv_cache_gib and rollout.max_model_len, on a GPU by rollout.gpu_memory_utilization."
                ) from None
        self._children = [child for child in multiprocessing.active_children() if child not in others]

    async def _warm_up(self) -> None:
        """Run the first request with log-probabilities and the first seeded one, each of which compiles a kernel for
        seconds."""
        room = self._config.max_model_len - 1
        for seed in (None, 0):
            num_tokens, policy = min(WARMUP_TOKENS, room), self._spec.first_policy
            sampling = Sampling(max_tokens=num_tokens, ignore_eos=True, seed=seed, policy=policy)
            await self._sample_unasked([0], sampling_params(WARMUP_SAMPLES, sampling, self._banned))

    async def _sample_unasked(self, prompt_ids: list[int], parameters: Any) -> None:
        """Sample what no caller has asked for, before requests are admitted."""
        prompt, lora = await self._prompt(prompt_ids, None), self._lora_request(self._spec.first_policy)
        await self._request(prompt, parameters, lora, 0)

    async def _repeat(self, prompt_ids: list[int], num_samples: int, num_tokens: int) -> None:
        """Sample responses that repeat the prompt's first token."""
        parameters = sampling_params(num_samples, Sampling(max_tokens=num_tokens, ignore_eos=True))
        parameters.allowed_token_ids = prompt_ids[:1]
        call = self._sample_unasked(prompt_ids, parameters)
        await self._in_time("trial of drafts", call, self._config.start_timeout_s, START_KEY)

    async def _is_drained(self) -> bool:
        """Admit no request, and wait until those under way have ended: none is cut short or sampled anew. False where
        they take longer than a phase."""
        self._admission.clear()
        give_up = time.monotonic() + self._spec.phase_timeout_s
        while self.num_in_flight and time.monotonic() < give_up:
            await asyncio.sleep(DRAIN_LOOK_S)
        return not self.num_in_flight

    async def _begin_again(self) -> None:
        """End vLLM's processes and start others, without drafts."""
        print(f"rollout.speculation: {self._drafts.verdict()}: the engine begins again without them", flush=True)
        num_tokens = self._num_tokens
        self._has_begun.clear()
        try:
            await self._start(without_drafts(self._spec))
        except (ResourceError, ModelError) as error:
            raise WorkerDied(f"the vLLM engine cannot begin again without drafts: {error}") from None
        finally:
            self._num_tokens = num_tokens  # less those of the warm-up
            self._has_begun.set()

    # Generation

    @property
    def _banned(self) -> Sequence[int]:
        """Tokens that are never sampled."""
        return () if self._pictures is None else self._pictures.token_ids

    async def _prompt(self, prompt_ids: list[int], pictures: PromptPictures | None) -> Any:
        """vLLM's form of a prompt. Features of pictures are computed in a thread."""
        check_pictures(self._pictures, pictures, self._config.max_pictures, self._spec.model_path)
        if self._pictures is None:
            return {"prompt_token_ids": prompt_ids}
        return await asyncio.to_thread(picture_prompt, self._pictures, prompt_ids, pictures)

    async def _answer(
        self, prompt_ids: Sequence[int], pictures: PromptPictures | None, parameters: Any, lora: Any, priority: int
    ) -> Any:
        """vLLM's output for one request, once the engine is awake and loads nothing."""
        await self._alive()
        response_room(prompt_ids, self._config.max_model_len)
        if self._config.speculation.is_on and parameters.top_k > 0 and not self._config.num_gpus_per_worker:
            # vLLM's CPU build dies of it at a step without drafts; what else it cannot check it refuses by itself
            raise DataError("top_k: an engine on a CPU takes none with rollout.speculation. Use top_p.")
        prompt = await self._prompt(list(prompt_ids), pictures)
        await self._admitted()
        self.num_in_flight += 1
        try:
            if self._config.keeps_caches:
                return await self._kept_samples(prompt, parameters, lora, priority)
            return await self._request(prompt, parameters, lora, priority)
        finally:
            self.num_in_flight -= 1

    async def _admitted(self) -> None:
        """Wait until the engine is awake and loads nothing."""
        await self._awake.wait()
        while not self._admission.is_set():  # another load may have begun between the event and this task's turn
            await self._admission.wait()
        self.check_alive()

    async def _kept_samples(self, prompt: Any, parameters: Any, lora: Any, priority: int) -> Any:
        """vLLM's output for one request whose samples keep their KV cache when weights change: each is a request of its
        own, with the seed that it has otherwise."""
        each = single_samples(parameters)
        tasks = [asyncio.create_task(self._kept_sample(prompt, one, lora, priority)) for one in each]
        try:
            first, *others = await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        first.outputs = [sample for output in (first, *others) for sample in output.outputs]
        return first

    async def _kept_sample(self, prompt: Any, parameters: Any, lora: Any, priority: int) -> Any:
        """As `_kept_samples`, of one. Where weights come before its first token it begins anew: so a sequence whose
        tokens are of one version has read its prompt under it, too."""
        while True:
            own = salted(prompt, self._version, with_pictures=not self._keeps_encoder_cache)
            if (output := await self._request(own, parameters, lora, priority)) is not None:
                return output
            await self._admitted()

    async def _request(self, prompt: Any, parameters: Any, lora: Any, priority: int) -> Any:
        """vLLM's output for one request; None where it is to begin anew."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id = str(next(self._request_ids))
        output: Any = None
        try:
            async for latest in self.llm.generate(
                prompt, parameters, request_id=request_id, lora_request=lora, priority=priority
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
        if request_id in self._restarted:
            self._restarted.remove(request_id)
            return None
        reasons = {sample.finish_reason for sample in output.outputs} if output is not None else {"nothing"}
        if "error" in reasons and not self._is_gone():  # such as a grammar that the engine cannot compile
            raise DataError("vLLM ended the request with an error of its own; its log says more.")
        if not reasons <= {"stop", "length"}:
            raise self._died("it ended a request without finishing it")
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        return output

    def _lora_request(self, policy: str = "") -> Any:
        """vLLM's request for the adapter that a request is to have; None for no adapter. Raises `DataError` for an
        unknown policy."""
        self._spec.check_policy(policy)
        return None

    # Loading

    async def _announce(self, info: Info) -> None:
        """Announce weights to vLLM's weight-transfer engine."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def _open(self, publication: Publication) -> MappedWeights:
        """Do all that can be done before the engine pauses: map the file here and in the engine's processes, verify
        it, or wait until another engine of the node has."""
        info = {"directory": publication.directory, "version": publication.version, "prefix": self._spec.prefix}
        mapped = await self._phase(publication, "open", asyncio.to_thread(MappedWeights, publication))
        await self._phase(publication, "prepare", self._announce(info))
        await self._phase(publication, "verify", asyncio.to_thread(mapped.verify_once))
        return mapped

    async def _exchange(self, delivery: Delivery, mapped: MappedWeights | None) -> None:
        """Swap the weights while nothing is scheduled. Requests that arrive meanwhile wait at `_admission`. vLLM is
        paused already while it sleeps, and continues when it wakes."""
        paused = self.num_in_flight > 0 and (self._awake.is_set() or not shares_gpu(self._config))
        if paused:
            await self._pause(delivery)
        try:
            if not paused:  # no request to preempt: it suffices to drop the prefixes cached under the old weights
                if not await self._phase(delivery, "pause", self.llm.reset_prefix_cache()):
                    raise WeightError(
                        f"weight sync to version {delivery.version}, phase pause: vLLM keeps prefixes that older "
                        "weights have cached."
                    )
                if self._pictures is not None and not self._keeps_encoder_cache:  # and the features of pictures
                    await self._phase(delivery, "pause", self.llm.reset_encoder_cache())
            await self._begin(delivery)
        except PenstockError:
            if paused:
                await self._resume(delivery)
            raise
        with self._breaking():
            async with self._loaded(delivery, mapped):
                await self._finish(delivery)
                served = await self._phase(delivery, "version", self.llm.get_weight_version())
                if served != str(delivery.version):
                    raise WeightError(
                        f"weight sync to version {delivery.version}: the engine says it serves {served!r}."
                    )
        if paused:
            await self._resume(delivery)
        self._version = delivery.version

    @asynccontextmanager
    async def _loaded(self, delivery: Delivery, mapped: MappedWeights | None) -> AsyncIterator[None]:
        """Load all weights before the block. A sender hears of the end only once the version has been asserted as
        well."""
        if isinstance(delivery, Publication):
            assert mapped is not None
            info = {"directory": delivery.directory, "version": delivery.version, "prefix": self._spec.prefix}
            info["verified_inode"] = mapped.inode
            await self._load_part(delivery, info)
            yield
        else:
            async with self._inbox.received(delivery, partial(self._load_part, delivery)):
                yield

    async def _begin(self, delivery: Delivery) -> None:
        await self._phase(delivery, "start", self.llm.start_weight_update())

    async def _finish(self, delivery: Delivery) -> None:
        call = self.llm.finish_weight_update(weight_version=str(delivery.version))
        await self._phase(delivery, "finish", call)

    async def _load_part(self, delivery: Delivery, info: Info) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._phase(delivery, "load", self.llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    @property
    def _keeps_encoder_cache(self) -> bool:
        """True if the next version computes the same features of pictures."""
        return self._pictures is not None and self._spec.tower_is_frozen

    async def _pause(self, delivery: Delivery) -> None:
        keeps = self._keeps_encoder_cache or self._config.keeps_caches
        self._paused.enter()
        if self._stats is not None and not self._config.keeps_caches:
            self._stats.excuse()
        try:
            await self._phase(delivery, "pause", self.llm.pause_generation(mode="keep", clear_cache=not keeps))
            if self._config.keeps_caches:
                await self._phase(delivery, "pause", self._give_up_unread())
            elif keeps:
                await self._phase(delivery, "pause", self.llm.reset_prefix_cache(reset_running_requests=True))
        except PenstockError:
            await self._resume(delivery)
            raise

    async def _give_up_unread(self) -> None:
        """Give up the requests without a token, which begin anew under the new weights."""
        unread = unread_requests(self.llm.output_processor)
        self._restarted.update(unread)
        await self.llm.abort(unread)

    async def _resume(self, delivery: Delivery) -> None:
        with self._breaking():
            await self._phase(delivery, "resume", self.llm.resume_generation())
        self._paused.leave()

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the engine broken where the block fails."""
        try:
            yield
        except PenstockError as error:
            self._broken = str(error)
            raise

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

    # Calls within deadlines

    async def _phase(self, delivery: Delivery, name: str, call: Awaitable[T]) -> T:
        phase = f"weight sync to version {delivery.version}, phase {name}"
        start = time.perf_counter()
        result = await self._call(phase, call)
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        if self._meters is not None:
            self._meters.add(table.ROLLOUT_LOAD_PHASES, seconds, phase="beside" if name in table.BESIDE else "paused")
        return result

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        """Return the result of a call within the deadline of a phase. Raises as `_in_time` does."""
        return await self._in_time(what, call, self._spec.phase_timeout_s, PHASE_KEY)

    async def _in_time(self, what: str, call: Awaitable[T], timeout_s: float, key: str) -> T:
        """Return the call's result. Raises `DeadlineExceeded` naming `what`; the engine's own failures as
        `WeightError`, `WorkerDied`."""
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the vLLM engine for {self._spec.model_path} did not answer within {timeout_s:g} s. Raise "
                f"{key}, or see its log."
            ) from None
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM reports failures of its processes as bare Exceptions with text
            if self.llm is not None and self.llm.errored:
                raise self._died(error) from None
            raise WeightError(f"{what}: {error}") from None

    def _is_gone(self) -> bool:
        return self.llm is None or self.llm.errored

    def _died(self, reason: object) -> WorkerDied:
        self._broken = self._broken or str(reason)
        codes = [child.exitcode for child in self._children if child.exitcode]
        message = failure_message(str(reason), self._output.tail(), ", ".join(map(how_ended, codes)))
        return WorkerDied(f"the vLLM engine for {self._spec.model_path} is gone: {message}")

    async def _alive(self) -> None:
        """Wait while the engine begins again. Raises `WorkerDied`."""
        await self._has_begun.wait()
        self.check_alive()

    def check_alive(self) -> None:
        if self._broken is not None or self.llm is None:
            reason = self._broken or "it was never started"
            raise WorkerDied(f"the vLLM engine for {self._spec.model_path} is not serving: {reason}.")


# Requests and answers


@dataclass(frozen=True)
class VllmRequest:
    """A call for samples in vLLM's terms."""

    call: SampleCall
    vocabulary: int
    chooses: bool
    """True if the engine can score chosen tokens of a prompt (vLLM's second model runner, which needs Triton)."""
    banned: Sequence[int]
    """Tokens that are never sampled."""
    detokenizer: Detokenizer

    def samples(self, num_samples: int) -> Any:
        """vLLM's parameters for the samples."""
        made = sampling_params(num_samples, self.call.sampling, self.banned, self.detokenizer)
        made.stop_token_ids = sorted({*self.call.stop_ids, *made.stop_token_ids})
        made.logprobs = min(self.call.topk_logprobs, self.vocabulary)
        return made

    def scored(self) -> Any:
        """vLLM's parameters for the scores of the prompt: with the sample, if it is the only one, otherwise with one
        token. Raises `DataError`."""
        call, ids = self.call, self.call.target_prompt_ids
        if call.num_samples > 1:
            call = replace(call, sampling=replace(call.sampling, max_tokens=1))
        made = replace(self, call=call).samples(1)
        made.skip_reading_prefix_cache = True
        if call.prompt_logprobs or call.topk_prompt_logprobs:
            made.prompt_logprobs = min(call.topk_prompt_logprobs, self.vocabulary)
        if positions := call.vocabulary_positions:
            if self.chooses:
                made.prompt_logprob_token_ids = np.tile(np.arange(self.vocabulary, dtype=np.int32), (positions, 1))
                made.prompt_logprob_start = len(call.prompt_ids) - 1 - positions
            elif len(call.prompt_ids) * self.vocabulary <= MOST_WHOLE:
                made.prompt_logprobs = -1
        if ids is None or not ids.size:
            return made
        if self.chooses:
            made.prompt_logprob_token_ids = ids.astype(np.int32)
        elif len(call.prompt_ids) * self.vocabulary <= MOST_SCORES:
            made.prompt_logprobs = -1
        else:
            raise DataError(
                f"target_prompt_ids: vLLM without Triton, as on a CPU, scores no chosen tokens of a prompt, and has to "
                f"return its whole vocabulary: {len(call.prompt_ids)} tokens times {self.vocabulary} are more than "
                f"{MOST_SCORES}. Set rollout.engine=hf."
            )
        return made

    def fill(self, scores: PromptScores, output: Any) -> None:
        """Fill in vLLM's scores of the prompt: for each position the token itself, then the likeliest ones."""
        ids, flat = scores.target_ids, output.prompt_logprobs
        if self.call.vocabulary_positions:
            scores.vocabulary = self._whole(output)
        for position in range(1, len(scores.logprobs) if flat is not None else 0):
            first = flat.start_indices[position]
            top = slice(first + 1, first + 1 + scores.num_top)
            scores.logprobs[position] = flat.logprobs[first]
            scores.top_ids[position], scores.top_logprobs[position] = flat.token_ids[top], flat.logprobs[top]
            if ids is not None and scores.targets is not None and not self.chooses:
                every = self._every(flat, position)
                scores.targets[position - 1] = np.where(ids[position - 1] < 0, 0, every[ids[position - 1]])
        if ids is not None and ids.size and self.chooses:
            scores.targets = np.where(ids < 0, np.float32(0), output.prompt_token_id_logprobs)

    def _whole(self, output: Any) -> np.ndarray | None:
        """Scores of the whole vocabulary at the last tokens of the prompt, `[R, V]`; None: they were not asked for."""
        if self.chooses:
            return np.asarray(output.prompt_token_id_logprobs, np.float32)
        flat, num_tokens = output.prompt_logprobs, len(self.call.prompt_ids)
        if flat.end_indices[num_tokens - 1] - flat.start_indices[num_tokens - 1] <= self.vocabulary:
            return None
        return np.stack([self._every(flat, at) for at in range(num_tokens)[-self.call.vocabulary_positions :]])

    def _every(self, flat: Any, position: int) -> np.ndarray:
        """Scores of the whole vocabulary at a token of the prompt, `[V]` float32."""
        scored = slice(flat.start_indices[position] + 1, flat.end_indices[position])
        every_V = np.zeros(self.vocabulary, np.float32)
        every_V[flat.token_ids[scored]] = flat.logprobs[scored]
        return every_V

    def sampled(self, sample: Any) -> SampledTokens:
        """One sample of a request, with the likeliest tokens at each of its positions."""
        flat, length, num_top = sample.logprobs, len(sample.token_ids), min(self.call.topk_logprobs, self.vocabulary)
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        top = None
        if num_top:
            places = np.array(flat.start_indices)[:, None] + 1 + np.arange(num_top)
            ids, values = np.array(flat.token_ids, np.int32)[places], np.array(flat.logprobs, np.float32)[places]
            top = TopTokens(ids.reshape(length, num_top), values.reshape(length, num_top))
        return SampledTokens(list(sample.token_ids), logprobs, sample.finish_reason, top)


def sampling_params(
    num_samples: int, sampling: Sampling, banned: Sequence[int] = (), detokenizer: Detokenizer = NO_TOKENIZER
) -> Any:
    """vLLM's parameters for a request. Without stop strings the text is decoded once at the end (`to_completion`), not
    token by token. `banned`: tokens that are never sampled, also where it is greedy. `detokenizer`: knows which stop
    strings are tokens. Raises `DataError` for what vLLM refuses."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        structure = StructuredOutputsParams(**sampling.structure) if sampling.structure else None
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise DataError(f"structure={sampling.structure!r:.200}: {error}") from None
    try:
        return SamplingParams(
            n=1 if sampling.temperature == 0 else num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            stop_token_ids=sorted(detokenizer.stop_ids(sampling.stop)),
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            structured_outputs=structure,
            logit_bias=dict.fromkeys(banned, -math.inf) or None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, VLLMValidationError) as error:
        raise DataError(f"vLLM refuses the request: {error}") from None


def samples_of_output(output: Any, num_samples: int) -> list[Any]:
    """The samples of a request. vLLM makes only one greedy sample, which is repeated."""
    return list(output.outputs) * (num_samples // len(output.outputs))


def to_completion(
    sample: Any, detokenizer: Detokenizer, *, detokenized: bool, routing: RoutingShape | None = None
) -> Completion:
    """The completion of one sample of a request. `detokenized`: vLLM has decoded its text already. `routing`: of the
    model, where the experts are recorded: vLLM has them of each token but the last one, `[L - 1, all layers, K]`.
    Raises `ResourceError` for tokens without a version."""
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    versions = [int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end)]
    if len(versions) != len(token_ids):
        raise ResourceError(
            f"vLLM says of {len(versions)} of {len(token_ids)} sampled tokens under which weights they were sampled "
            "(CompletionOutput.weight_versions), without which the staleness of the rest is not known. Install the "
            "version of vLLM that Penstock's requirements name."
        )
    text = detokenizer.cut(token_ids, sample.text) if detokenized else detokenizer.text(token_ids)
    experts = b""
    if routing is not None:
        experts = routing.records(sample.routed_experts[:, list(routing.layers)]).tobytes()
    return Completion(token_ids, logprobs, versions, text, sample.finish_reason, experts)


def sampling_progress(processor: Any) -> SamplingProgress:
    """Total counts of the requests that vLLM's `OutputProcessor` has, without asking for their outputs before the end.
    Finished samples of a group wait there until the whole group is finished."""
    samples = processor.request_states.values()
    done = [sample for group in processor.parent_requests.values() for sample in group.output_aggregator if sample]
    num_tokens = sum(sample.detokenizer.num_output_tokens() for sample in samples)
    return SamplingProgress(num_tokens + sum(len(sample.token_ids) for sample in done), len(samples))


def picture_prompt(processor: PictureProcessor, prompt_ids: list[int], pictures: PromptPictures | None) -> Any:
    """A prompt with the features of its pictures, if it has any, as vLLM's engine takes it. vLLM gets expanded tokens,
    features and places, and processes nothing: what the trainer reads is what it has read. A picture's hash stands for
    it in its caches. Raises `DataError` where tokens and pictures do not belong together."""
    features, family = processor.checked_features(prompt_ids, pictures), processor.family
    if features is None or pictures is None:
        return {"prompt_token_ids": prompt_ids}
    import torch
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    rows = torch.tensor(family.num_rows(features.grid_thw))
    tensors: Any = family.inputs(torch.from_numpy(features.pixel_values), torch.from_numpy(features.grid_thw))
    # Of a prompt whose prefix is cached vLLM lets go of all fields but those that stay on the host, and without M-RoPE
    # of all. Weights that come while it is under way drop the prefix, and the features of pictures: then pixels are
    # needed after all.
    fields = family.inputs(
        MultiModalFieldConfig.flat_from_sizes(IMAGE, rows, keep_on_cpu=True),
        MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    )
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {IMAGE: [hash_of(picture) for picture in pictures.encoded]},
        {IMAGE: [PlaceholderRange(offset, length) for offset, length in pictures.ranges]},
    )


# Start of the processes


def engine_arguments(spec: EngineSpec, family: Family | None = None) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. `family`: of a vision model. Imports vLLM. Raises
    `ConfigError` for an option that vLLM does not know."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    config = spec.config
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in config.engine_options.keys() - known:
        near = ", ".join(get_close_matches(name, known, n=3))
        hint = f" Near it: {near}." if near else ""
        raise ConfigError(f"rollout.engine_options.{name}: this vLLM has no such argument of AsyncEngineArgs.{hint}")
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrent_samples + spec.is_probed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKENDS.get(spec.transport, spec.transport)),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_CALLS,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if config.num_gpus_per_worker:
        arguments["gpu_memory_utilization"] = config.gpu_share
        arguments["enable_sleep_mode"] = shares_gpu(config)
    else:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        arguments["block_size"] = CPU_BLOCK_TOKENS
        # A seeded request whose prefill is cut in two has its generator set back, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, config.max_model_len + 1)  # a draft model's too
    # By itself it would have Ray start its processes, as it finds its actor in a placement group.
    arguments["distributed_executor_backend"] = "uni" if config.tensor_parallel_size == 1 else "mp"
    if config.router_replay:
        arguments["enable_return_routed_experts"] = True
    if family is not None:
        arguments |= picture_arguments(config, family)
    if config.speculation.is_on:
        arguments |= draft_arguments(spec, family, arguments["max_num_seqs"])
    if spec.by_priority:
        arguments["scheduling_policy"] = "priority"
    arguments |= reveal(config.engine_options)
    if spec.adapter is not None:
        arguments |= adapter_arguments(spec.adapter.rank, max(1, len(spec.policies)))
    if spec.is_probed or spec.adapters is not None:
        arguments["max_logprobs"] = -1
    if (limits := spec.adapters) is not None:  # noqa: SIM102 - the comment is of the second condition
        if limits.max_rank != WHOLE:  # of whole models one is there at a time
            # On a CPU an adapter of zeros, which serves the base model, takes a place of its own.
            arguments |= adapter_arguments(limits.max_rank, limits.max_loaded + (not config.num_gpus_per_worker))
            arguments |= {"worker_extension_cls": WORKER_WITH_HEADS} if limits.head else {}
    return arguments


def adapter_arguments(rank: int, num_loaded: int) -> dict[str, Any]:
    """Further arguments of an engine with room for adapters of up to this rank."""
    room = min(some for some in LORA_RANKS if some >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": num_loaded}


def picture_arguments(config: RolloutConfig, family: Family) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a vision model. Features come with their pixels normalized: by default vLLM
    does that in the model, and would do it a second time. The cache of processed pictures is off: it would keep, in two
    processes, what is processed elsewhere. A run of text allows for one: with none vLLM leaves the tower out, whose
    weights are published. Prefixes are cached for M-RoPE alone: see `picture_prompt`."""
    return {
        "enable_prefix_caching": family.has_grids,
        "limit_mm_per_prompt": {IMAGE: max(config.max_pictures, 1), "video": 0},
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }


def shares_gpu(config: RolloutConfig) -> bool:
    """Return whether the engine has a part of a GPU, and must be able to sleep while another uses it."""
    return 0 < config.num_gpus_per_worker < 1


def discards_weights(spec: EngineSpec) -> bool:
    """Return whether the engine's weights are brought again after a sleep, and need not be kept meanwhile. Adapters
    are published without the base that they change, and streams come with a step of the trainer alone."""
    return spec.adapter is None and spec.adapters is None and spec.transport not in STREAMS


@contextmanager
def vllm_environment(spec: EngineSpec) -> Iterator[None]:
    """Set environment variables for the import of vLLM and for the processes that it starts; put them back afterwards.

    What the user has set stays as it is, but for the number of threads.
    """
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if Path(spec.model_path).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if (ready_s := math.ceil(spec.config.engine_start_s)) > VLLM_READY_S:
        defaults["VLLM_ENGINE_READY_TIMEOUT_S"] = str(ready_s)  # its own deadline comes after ours
    if folder := compiled_folder():
        defaults["TORCHINDUCTOR_CACHE_DIR"] = folder  # of what torch compiles outside of vLLM's own cache
    values = {name: os.environ.get(name, value) for name, value in defaults.items()}
    if spec.config.router_replay:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records experts
    if not spec.config.num_gpus_per_worker:
        values |= _cpu_environment(spec)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cpu_environment(spec: EngineSpec) -> dict[str, str]:
    """The environment of the CPU build: threads as asked for and bound nowhere, since trainer and engine share the
    cores; waiting threads sleep at once: ones that spin make two processes on the same cores several times slower.

    With one rank the model runs in the engine's own process, as on a GPU. vLLM's CPU build otherwise puts it into
    another one to pin its threads, and the two then wait for each other by spinning. `VLLM_ENABLE_V1_MULTIPROCESSING=0`
    satisfies vLLM's check; `AsyncLLM` starts its engine process all the same.
    """
    values = {
        "OMP_NUM_THREADS": str(max(1, spec.num_threads)),
        "OMP_WAIT_POLICY": SETTINGS["OMP_WAIT_POLICY"],
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if spec.config.tensor_parallel_size == 1:
        values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return values


class VllmStats:
    """What vLLM knows of itself after each step: its queue, its KV cache, its prefix cache. A stat logger, with the
    methods of vLLM's `StatLoggerBase`: vLLM gathers statistics only where there is one."""

    def __init__(self, meters: Meters, drafts: DraftTrial) -> None:
        self.num_waiting = self.num_running = self.num_preempted = 0
        """Numbers of sequences after the last step, and of those preempted so far for want of memory."""
        self._usage = self._num_steps = 0.0
        self._num_excused = 0
        """Preemptions to come that new weights have caused: vLLM tells of one when its sequence goes on."""
        self._meters, self._drafts = meters, drafts
        self.num_read_again = 0
        """Tokens of sequences that were preempted, by new weights or for want of room, and read again."""
        for counter in (table.ROLLOUT_PREFIX_LOOKUPS, table.ROLLOUT_PREFIX_HITS):
            meters.add(counter, 0)

    def logger(self, _config: Any, _engine_index: int) -> "VllmStats":
        """The stat logger; the signature is that of vLLM's factories."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Note the statistics of one step. `scheduler_stats`: vLLM's `SchedulerStats`."""
        if scheduler_stats is None:
            return
        self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.num_running, self._usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._num_steps += iteration_stats.num_generation_tokens / max(1, self.num_running)
        self._drafts.record(scheduler_stats.spec_decoding_stats, iteration_stats, time.perf_counter())
        self._count_preempted(iteration_stats.num_preempted_reqs if iteration_stats is not None else 0)
        prefixes = scheduler_stats.prefix_cache_stats
        self.num_read_again += prefixes.preempted_queries - prefixes.preempted_hits
        self._meters.put(table.ROLLOUT_KV_CACHE, scheduler_stats.kv_cache_usage)
        self._meters.add(table.ROLLOUT_PREFIX_LOOKUPS, prefixes.queries)
        self._meters.add(table.ROLLOUT_PREFIX_HITS, prefixes.hits)

    def excuse(self) -> None:
        """Do not count the preemption of what is running now: new weights are the reason."""
        self._num_excused = self.num_running

    def kv_load(self, num_fitting: float, max_len: int) -> KvLoad:
        """`num_fitting`: sequences of `max_len` tokens that fit at once."""
        return KvLoad(
            num_fitting * max_len, max_len, self._usage, self.num_running, self._num_steps, self.num_preempted
        )

    def _count_preempted(self, count: int) -> None:
        excused = min(count, self._num_excused)
        self._num_excused -= excused
        self.num_preempted += count - excused

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
