"""A rollout engine on plain transformers: for machines without a vLLM build, and as a reference that is easy to
understand.

`generate` computes one group by itself (one prefill, then n rows without padding), so its result depends on the prompt,
the seed and the weights alone, and not on other requests or on timing. All compute happens in one thread, group after
group; the event loop stays free. `load` runs between two decode steps: tokens sampled afterwards carry the new version,
and the KV cache of the tokens before stays as it was. Where adapters are published the engine adds them to the weights
that it started with, those of several policies each in a room of its own. `generate_group` is the synchronous core, for
straight-line programs. `sample` does the same with one of many adapters, which come by name and are exchanged between
groups (`MergedAdapters`).

The file has the sampling distribution as pure functions of logits (temperature, min-p, top-k, top-p, in vLLM's order),
prompts with pictures, a group while it grows, the adapters, and the engine.

Shapes: B sequences, L tokens of the prompt, V vocabulary.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.conf.errors import DataError, DeadlineExceeded, ModelError, UnknownAdapter, WeightError, WorkerDied
from penstock.metering.meters import Meters
from penstock.workers.models.routed_experts import RoutingRecorder
from penstock.workers.pictures.processor import PictureProcessor, auto_class, check_pictures
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import (
    AdapterLimits,
    AdapterState,
    Completion,
    EngineSpec,
    Publication,
    SampleCall,
    SampledTokens,
    SampleOutput,
    Sampling,
    SamplingProgress,
    TopTokens,
)
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.named_adapters import check_adapter, check_whole, split_factors
from penstock.workers.rollout.prompt_scores import PromptScores, check_call, needs_prompt_scores, response_room
from penstock.workers.weights.checkpoint_form import CheckpointForm, check_model, nonfinite_weights
from penstock.workers.weights.publication.adapter import layer_shapes, published_factors
from penstock.workers.weights.publication.publication_files import MappedWeights

T = TypeVar("T")


def sampling_logprobs(logits_BV: torch.Tensor, sampling: Sampling, banned: Sequence[int] = ()) -> torch.Tensor:
    """The log-probabilities, `[B, V]` float32, of the distribution that is sampled from; -inf where truncated away.
    `banned`: tokens that are never sampled, whose probability is given to all other tokens first.

    At `temperature=0` (greedy) these are the model's own, as if the temperature were 1: the distribution itself would
    be a point.
    """
    logits_BV = logits_BV.float()
    if banned:
        logits_BV = logits_BV.index_fill(-1, torch.tensor(banned, device=logits_BV.device), -torch.inf)
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.min_p > 0:
        logits_BV = _keep(logits_BV, logits_BV >= logits_BV.amax(-1, keepdim=True) + math.log(sampling.min_p))
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV = _keep(logits_BV, logits_BV >= logits_BV.topk(sampling.top_k, -1).values[:, -1:])
    if sampling.top_p < 1:
        logits_BV = _nucleus(logits_BV, sampling.top_p)
    return logits_BV.log_softmax(-1)


def choose_tokens(logprobs_BV: torch.Tensor, uniforms_B: torch.Tensor | None) -> torch.Tensor:
    """Choose token ids, `[B]` int64: by inverse distribution function from float64 uniforms in [0, 1), or the likeliest
    for None."""
    if uniforms_B is None:
        return logprobs_BV.argmax(-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    targets_B1 = torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    last = logprobs_BV.shape[-1] - 1  # beyond it only where probabilities are no numbers, which the worker reports
    return torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=last)


def draw_uniforms(num_samples: int, num_draws: int, seed: int | None) -> torch.Tensor:
    """Draw `[num_samples, num_draws]` float64 in [0, 1). Row i comes from a generator of its own, seeded `seed + i`
    (None: entropy)."""
    rows = []
    for index in range(num_samples):
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed + index)
        rows.append(torch.rand(num_draws, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _keep(logits_BV: torch.Tensor, mask_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.masked_fill(~mask_BV, -torch.inf)


def _nucleus(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least top_p; always one."""
    ascending_BV, order_BV = logits_BV.sort(-1)
    dropped_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped_BV[:, -1] = False
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf)


@dataclass(frozen=True)
class PicturePrompt:
    """A prompt with its pictures, as transformers' vision models are called with it, and each token after it.

    Positions are given with every call. A model's own are found by what it has read last: after a prompt with pictures,
    the tokens that follow a text without any would be placed as if it had some.
    """

    inputs: Mapping[str, torch.Tensor]
    """Arguments of the forward pass of the prompt, beside its tokens."""
    position: int
    """Position of the first token after the prompt, on all axes (M-RoPE, arXiv 2409.12191)."""

    @classmethod
    def of(
        cls, lm: Any, processor: PictureProcessor, prompt_ids: Sequence[int], pictures: PromptPictures | None
    ) -> "PicturePrompt":
        """Read a prompt. Raises `DataError` where tokens and pictures do not belong together."""
        features, family = processor.checked_features(prompt_ids, pictures), processor.family
        positions_1L = torch.arange(len(prompt_ids))[None]
        position_ids = positions_1L.expand(3, 1, -1) if family.has_grids else positions_1L
        inputs: dict[str, torch.Tensor] = {}
        if features is not None and pictures is not None:
            inputs = family.inputs(torch.from_numpy(features.pixel_values), torch.from_numpy(features.grid_thw))
            if family.has_grids:
                kinds_1L = torch.zeros(1, len(prompt_ids), dtype=torch.int32)
                for offset, length in pictures.ranges:
                    kinds_1L[0, offset : offset + length] = 1
                ids_1L, grids = torch.tensor([list(prompt_ids)]), inputs["image_grid_thw"]
                position_ids, _ = lm.model.get_rope_index(ids_1L, kinds_1L, image_grid_thw=grids)
        inputs["position_ids"] = position_ids
        return cls({name: value.to(lm.device) for name, value in inputs.items()}, int(position_ids.max()) + 1)

    def later(self, num_before: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Arguments of the forward pass of the sampled token number `num_before`, counted from 0."""
        first = self.inputs["position_ids"]
        shape = (*first.shape[:-2], num_rows, 1)
        return {"position_ids": torch.full(shape, self.position + num_before, device=first.device)}


@dataclass(frozen=True)
class GroupRequest:
    """The request for the responses of a group."""

    prompt_ids: Sequence[int]
    num_samples: int
    sampling: Sampling
    pictures: PromptPictures | None = None
    is_over: threading.Event | None = None
    """Set from another thread when the responses are no longer wanted."""
    stop_ids: frozenset[int] = frozenset()
    num_top: int = 0
    """Likeliest tokens to be noted at each position."""


@dataclass
class ResponseRow:
    """A row of a group while it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """Likeliest tokens at each position with their log-probabilities, where they are asked for."""
    experts: list[bytes] = field(default_factory=list)
    """Records of the tokens that were read for it, the prompt's in one."""

    def sampled(self, num_top: int) -> SampledTokens:
        top = None
        if num_top:
            ids, logprobs = zip(*self.top, strict=True)
            top = TopTokens(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))
        return SampledTokens(self.token_ids, self.logprobs, self.finish_reason or "length", top)


class MergedAdapters:
    """Adapters by name, of which the requested one is merged into the model's weights. Or whole models, of which the
    requested one takes the place of the model's weights. Or the newest adapter of each policy.

        use(a) ─▶ W of its layers becomes W + alpha / rank * B @ A ─▶ use(None) ─▶ W
        publish("solver", A, B) ─▶ merged into a room of its own ─▶ use("solver")

    The model's own parameters are never written to: a layer is given another one while it is adapted. So the base comes
    back to the bit, and merged weights depend on nothing that was served in between. A head that shares its weights
    with the embedding is adapted alone.

    Lifecycle: `add`, `drop` and `find` from any thread; all else from the one that computes. Memory: the adapters
    themselves, and a second copy of the layers that the one in use changes; a copy of them for each policy.
    """

    def __init__(self, lm: Any, limits: AdapterLimits | None) -> None:
        self._lm, self._limits = lm, limits
        self._states: dict[str, AdapterState] = {}
        self._used: AdapterState | str | None = None
        self._base: dict[str, torch.nn.Parameter] = {}
        """The model's own weights that are replaced now, by their names."""
        self._merged: dict[str, torch.nn.Parameter] = {}
        """Room for other weights, which one adapter after the other takes."""
        self._published: dict[str, dict[str, torch.nn.Parameter]] = {}
        """Weights with the newest adapter of each policy."""

    def names(self) -> list[str]:
        return list(self._states)

    def add(self, name: str, state: AdapterState) -> None:
        """Keep an adapter, unless its name is known. Raises `DataError` for layers that the model does not have, and
        for a rank beyond the limits."""
        if name not in self._states:
            if state.spec.is_whole:
                check_whole(name, state, {key: tuple(one.shape) for key, one in self._lm.named_parameters()})
            else:
                check_adapter(name, state, self._shape_of, self._limits)
            self._states[name] = state.for_sampling()

    def drop(self, name: str) -> None:
        """Forget an adapter, if it is known. One in use stays in use until the next `use`."""
        self._states.pop(name, None)

    def find(self, name: str | None) -> AdapterState | None:
        """The adapter, for `use`. Raises `UnknownAdapter`."""
        if name is None:
            return None
        if name not in self._states:
            raise UnknownAdapter(f"adapter {name!r}: the engine does not have it. Add it before you sample from it.")
        return self._states[name]

    @torch.inference_mode()
    def use(self, state: AdapterState | str | None) -> None:
        """Change the model's weights to those with an adapter, to those with the newest adapter of a policy, by its
        name, if there is one, or to its own."""
        if state is self._used:
            return
        for name, weight in self._base.items():
            self._set(name, weight)
        self._base = {}
        if isinstance(state, str):
            for name, weight in self._published.get(state, {}).items():
                self._put([name], weight)
        elif state is not None and state.spec.is_whole:
            self._replace(state)
        elif state is not None:
            for layer, of_layer in split_factors(state).items():
                name, values = self._merged_weight(layer, of_layer, state.spec.alpha / state.spec.rank)
                self._substitute([name], values)
        self._used = state

    @torch.inference_mode()
    def publish(self, policy: str, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], scale: float) -> None:
        """Merge A and B of layers as a policy's newest adapter. Where it is in use, the model goes on with it."""
        room = self._published.setdefault(policy, {})
        for layer, of_layer in factors.items():
            name, values = self._merged_weight(layer, of_layer, scale)
            if name not in room:
                with torch.inference_mode(False):
                    room[name] = torch.nn.Parameter(torch.empty_like(self._own(name)), requires_grad=False)
            room[name].copy_(values)
            if self._used == policy:
                self._put([name], room[name])

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Restore the model's own weights within the block, which may change them. Frees the merged ones."""
        used = self._used
        self.use(None)
        self._merged.clear()
        yield
        self.use(used)

    def to(self, device: str) -> None:
        """Move the model, and what is published."""
        with self.base_weights():
            self._lm.to(device)
            for weight in (weight for room in self._published.values() for weight in room.values()):
                weight.data = weight.data.to(device)

    def _merged_weight(
        self, layer: str, factors: tuple[np.ndarray, np.ndarray], scale: float
    ) -> tuple[str, torch.Tensor]:
        """The weight of a layer with an adapter, float32, and its name."""
        base, (a, b) = self._own(f"{layer}.weight"), map(torch.from_numpy, factors)
        return f"{layer}.weight", base.float() + (scale * (b @ a)).to(base.device)

    def _own(self, name: str) -> torch.nn.Parameter:
        """The model's own weight."""
        weight: torch.nn.Parameter = self._base[name] if name in self._base else self._lm.get_parameter(name)
        return weight

    def _replace(self, state: AdapterState) -> None:
        """Put a whole model's weights in the place of the model's own; a tied one in each of its places."""
        places: dict[int, list[str]] = {}
        for name, weight in self._lm.named_parameters(remove_duplicate=False):
            places.setdefault(id(weight), []).append(name)
        weights = dict(self._lm.named_parameters())
        for name, values in state.weights().items():
            self._substitute(places[id(weights[name])], torch.from_numpy(values))

    def _substitute(self, names: list[str], values: torch.Tensor) -> None:
        """Put values in the place of a weight, under each of its names."""
        if names[0] not in self._merged:
            self._merged[names[0]] = torch.nn.Parameter(torch.empty_like(self._own(names[0])), requires_grad=False)
        self._merged[names[0]].copy_(values)
        self._put(names, self._merged[names[0]])

    def _put(self, names: Sequence[str], weight: torch.nn.Parameter) -> None:
        """Put a weight in the place of the model's own, under each of its names."""
        for name in names:
            self._base[name] = self._own(name)
            self._set(name, weight)

    def _set(self, name: str, weight: torch.nn.Parameter) -> None:
        module, _, own = name.rpartition(".")
        setattr(self._lm.get_submodule(module), own, weight)

    def _shape_of(self, layer: str) -> tuple[int, int] | None:
        try:
            module = self._lm.get_submodule(layer)
        except AttributeError:
            return None
        return (module.out_features, module.in_features) if isinstance(module, torch.nn.Linear) else None


class HfEngine:
    """Lifecycle: `start`, then `generate` and `load` in any order and concurrency, then `close`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._config, self._adapter = spec, spec.config, spec.adapter
        self._version = spec.version
        self.model: Any = None
        self._form = CheckpointForm(None)
        self._adapters = MergedAdapters(None, spec.adapters)
        self._processor: PictureProcessor | None = None
        """Processor of the model's pictures; None for a model of text."""
        self._banned: tuple[int, ...] = ()
        """Tokens that are never sampled."""
        self._recorder: RoutingRecorder | None = None
        self._detokenizer = NO_TOKENIZER
        self._eos_ids: frozenset[int] = frozenset()
        self._interrupts: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._loading = asyncio.Lock()
        """Lock by which versions are loaded in the order in which they were asked for."""
        self._num_tokens = self._num_in_flight = self._tokens_in_flight = 0
        self._paused_s = 0.0
        self._compute: ThreadPoolExecutor | None = None
        self._closing = threading.Event()
        self._awake = asyncio.Event()
        self._awake.set()

    async def start(self) -> None:
        """Load model and tokenizer. Raises `ModelError` if the directory has none."""
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        await asyncio.get_running_loop().run_in_executor(self._compute, self.open_model)

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        """Sample the responses to a prompt. Raises `PromptRefused` for a prompt that leaves no room for a response,
        `DataError` for a structure, and for pictures that do not belong to the prompt or that the model cannot see,
        `WorkerDied` once closed."""
        group = partial(self.generate_group, prompt_ids, num_samples, sampling, pictures=pictures)
        return await self._run_group(group, num_samples, sampling)

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, as `AdapterEngine` says it: the same bits for the same call and adapter."""
        self._executor()
        check_call(call, self.model.config.get_text_config().vocab_size)
        group = partial(self._sample_group, self._adapters.find(adapter), call)
        return await self._run_group(group, call.num_samples, call.sampling)

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        self._executor()
        await asyncio.to_thread(self._adapters.add, name, state)

    async def drop_adapter(self, name: str) -> None:
        self._executor()
        self._adapters.drop(name)

    def adapters(self) -> list[str]:
        return self._adapters.names()

    async def _run_group(self, group: Callable[..., T], num_samples: int, sampling: Sampling) -> T:
        """Compute a group in the engine's thread, once it is awake. `group`: takes the event `is_over`."""
        if sampling.structure:
            raise DataError("the hf engine samples without structure: set rollout.engine=vllm.")
        executor = self._executor()
        await self._awake.wait()
        call = asyncio.get_running_loop().run_in_executor
        self._num_in_flight += num_samples
        is_over = threading.Event()
        try:
            return await call(executor, partial(group, is_over=is_over))
        finally:
            is_over.set()
            self._num_in_flight -= num_samples

    async def load(self, publication: Publication) -> None:
        """Load a publication. Raises `WeightError` (the old weights stay), or `DeadlineExceeded` when a decode step
        takes longer than the deadline."""
        async with self._loading:
            await self._load(publication)

    async def _load(self, publication: Publication) -> None:
        executor = self._executor()
        mapped = await asyncio.to_thread(self._open_checked, publication)
        done: Future[None] = Future()
        self._interrupts.append((lambda: self._exchange(mapped, publication.version), done))
        executor.submit(self._run_interrupts)
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), self._spec.phase_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"weight sync to version {publication.version}, phase load: the hf engine did not reach "
                f"the end of a decode step within {self._spec.phase_timeout_s:g} s. Raise weights.phase_timeout_s."
            ) from None

    def kv_load(self) -> None:
        return None

    async def nonfinite_weights(self) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(self._executor(), self._nonfinite_weights)

    def _nonfinite_weights(self) -> list[str]:
        found: dict[str, None] = {}
        for policy in self._policies:
            self._adapters.use(policy)
            found |= dict.fromkeys(nonfinite_weights(self.model))
        return list(found)

    async def sleep(self) -> None:
        """Leave the device: on a GPU the model goes to the host's memory."""
        executor = self._executor()
        self._awake.clear()
        if self._config.num_gpus_per_worker:
            await asyncio.get_running_loop().run_in_executor(executor, self._adapters.to, "cpu")

    async def wake(self) -> None:
        executor = self._executor()
        if self._config.num_gpus_per_worker:
            await asyncio.get_running_loop().run_in_executor(executor, self._adapters.to, "cuda")
        self._awake.set()

    @property
    def _policies(self) -> tuple[str, ...] | tuple[None]:
        """Names of the policies whose adapters are published, "" for the only one; None: there are no adapters."""
        return (None,) if self._adapter is None else self._spec.policies or ("",)

    def _weights_of(self, sampling: Sampling) -> str | None:
        """What a request is to be sampled from. Raises `DataError` for an unknown policy."""
        self._spec.check_policy(sampling.policy)
        return sampling.policy if self._adapter is not None else None

    async def version(self) -> int:
        return self._version

    def sampled(self) -> SamplingProgress:
        num_tokens, in_flight = self._num_tokens, self._num_in_flight
        return SamplingProgress(num_tokens, in_flight, self._tokens_in_flight, paused_s=self._paused_s)

    async def close(self) -> None:
        """Stop. Groups in flight end with `WorkerDied`."""
        self._closing.set()
        if self._compute is not None:
            self._compute.shutdown(wait=False, cancel_futures=True)
            self._compute = None

    def open_model(self) -> None:
        """Load model and tokenizer into this process; `start` does it in the engine's own thread. Raises `ModelError`,
        and `ConfigError` for a model that has no routers to record."""
        from transformers import AutoConfig, AutoTokenizer

        torch.set_num_threads(self._spec.num_threads)  # of this thread, which is the one that computes
        dtype = getattr(torch, self._config.dtype)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._spec.model_path)
            self._processor = PictureProcessor.of_or_none(self._spec.model_path, self._spec.picture_digest)
            kind = auto_class(AutoConfig.from_pretrained(self._spec.model_path))
            check_model(self._spec.model_path)
            self.model = kind.from_pretrained(self._spec.model_path, dtype=dtype).eval()
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path={self._spec.model_path}: the hf engine cannot load it: {error}") from None
        self._detokenizer = Detokenizer(tokenizer)
        self._banned = () if self._processor is None else self._processor.token_ids
        self._form = CheckpointForm(self.model, stacked=True)
        self._adapters = MergedAdapters(self.model, self._spec.adapters)
        self._adapters.use(self._policies[0])
        if self._config.router_replay:
            self._recorder = RoutingRecorder(self.model)
        if self._config.num_gpus_per_worker:
            self.model.to("cuda")
        generation = self.model.generation_config.eos_token_id
        eos_ids = generation if isinstance(generation, list) else [generation]
        self._eos_ids = frozenset(token for token in (*eos_ids, tokenizer.eos_token_id) if token is not None)

    @torch.inference_mode()
    def generate_group(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, is_over: threading.Event | None = None,
        pictures: PromptPictures | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Sample n responses to one prompt, in this thread. Needs `open_model` (or `start`) before. `is_over`: set from
        another thread when the responses are no longer wanted; they end then."""
        self._adapters.use(self._weights_of(sampling))
        stop_ids = self._detokenizer.stop_ids(sampling.stop)
        request = GroupRequest(prompt_ids, num_samples, sampling, pictures, is_over, stop_ids)
        return [self._completion(response) for response in self._responses(request)]

    @torch.inference_mode()
    def _sample_group(self, state: AdapterState | None, call: SampleCall, is_over: threading.Event) -> SampleOutput:
        """Answer a call in this thread."""
        self._adapters.use(self._weights_of(call.sampling) if state is None else state)
        stop_ids = self._detokenizer.stop_ids(call.sampling.stop) | {*call.stop_ids}
        request = GroupRequest(
            call.prompt_ids, call.num_samples, call.sampling, call.pictures, is_over, stop_ids, call.topk_logprobs,
        )  # fmt: skip
        self._room(call.prompt_ids, call.sampling)
        scores = PromptScores(call, self.model.config.get_text_config().vocab_size)
        if needs_prompt_scores(call):
            inputs, _ = self._inputs(request)
            scores.fill(self.model(**inputs).logits[0])
            if self._recorder is not None:
                self._recorder.take()
        return scores.output([response.sampled(call.topk_logprobs) for response in self._responses(request)])

    def _inputs(self, request: GroupRequest) -> tuple[dict[str, torch.Tensor], PicturePrompt | None]:
        """Arguments of the forward pass of the prompt, and its pictures."""
        prompt_ids, pictures = request.prompt_ids, request.pictures
        check_pictures(self._processor, pictures, self._config.max_pictures, self._spec.model_path)
        seen = None if self._processor is None else PicturePrompt.of(self.model, self._processor, prompt_ids, pictures)
        inputs = {"input_ids": torch.tensor([list(prompt_ids)], device=self.model.device)}
        return inputs | ({} if seen is None else dict(seen.inputs)), seen

    def _responses(self, request: GroupRequest) -> list[ResponseRow]:
        """Sample the responses to one prompt under the weights that the model has now."""
        from transformers import DynamicCache

        num_samples, sampling, is_over = request.num_samples, request.sampling, request.is_over
        num_tokens = self._room(request.prompt_ids, sampling)
        uniforms = None if sampling.temperature == 0 else draw_uniforms(num_samples, num_tokens, sampling.seed)
        responses = [ResponseRow() for _ in range(num_samples)]
        active = list(range(num_samples))
        cache = DynamicCache(config=self.model.config)
        inputs, seen = self._inputs(request)
        for position in range(num_tokens):
            self._run_interrupts()
            logits_BV = self.model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            if self._recorder is not None:
                records = self._recorder.take()  # of the prompt, or of a token of each active row
                for index, row in enumerate(active):
                    responses[row].experts.append((records if position == 0 else records[index]).tobytes())
            if position == 0:
                cache.batch_repeat_interleave(num_samples)
                logits_BV = logits_BV.expand(num_samples, -1)
            logprobs_BV = sampling_logprobs(logits_BV, sampling, self._banned).cpu()
            chosen_B = choose_tokens(logprobs_BV, None if uniforms is None else uniforms[active, position])
            self._extend([responses[row] for row in active], chosen_B, logprobs_BV, request)
            going_on = [index for index, row in enumerate(active) if responses[row].finish_reason is None]
            if not going_on or (is_over is not None and is_over.is_set()):
                break
            if len(going_on) < len(active):
                cache.batch_select_indices(torch.tensor(going_on, device=self.model.device))
                active = [active[index] for index in going_on]
                chosen_B = chosen_B[going_on]
            inputs = {"input_ids": chosen_B[:, None].to(self.model.device)}
            inputs |= {} if seen is None else seen.later(position, len(chosen_B))
        self._tokens_in_flight -= sum(len(response.token_ids) for response in responses)
        return responses

    def _room(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        return min(sampling.max_tokens, response_room(prompt_ids, self._config.max_model_len))

    def _extend(
        self, responses: list[ResponseRow], chosen_B: torch.Tensor, logprobs_BV: torch.Tensor, request: GroupRequest
    ) -> None:
        """Add a token to each unfinished response, and note which of them end with it."""
        sampling = request.sampling
        chosen_logprobs_B = logprobs_BV.gather(-1, chosen_B[:, None])[:, 0]
        self._num_tokens += len(responses)
        self._tokens_in_flight += len(responses)
        if request.num_top:
            best = logprobs_BV.topk(min(request.num_top, logprobs_BV.shape[-1]), -1)
            for response, ids, values in zip(responses, best.indices.tolist(), best.values.tolist(), strict=True):
                response.top.append((ids, values))
        for response, token, logprob in zip(responses, chosen_B.tolist(), chosen_logprobs_B.tolist(), strict=True):
            response.token_ids.append(token)
            response.logprobs.append(logprob)
            response.versions.append(self._version)
            if token in request.stop_ids or (token in self._eos_ids and not sampling.ignore_eos):
                response.finish_reason = "stop"
            elif sampling.stop:
                text = self._detokenizer.text(response.token_ids)
                starts = [text.index(stop) for stop in sampling.stop if stop in text]
                if starts:
                    response.text, response.finish_reason = text[: min(starts)], "stop"

    def _completion(self, response: ResponseRow) -> Completion:
        text = self._detokenizer.text(response.token_ids) if response.text is None else response.text
        return Completion(
            response.token_ids, response.logprobs, response.versions, text, response.finish_reason or "length",
            b"".join(response.experts),
        )  # fmt: skip

    def _executor(self) -> ThreadPoolExecutor:
        if self._compute is None:
            raise WorkerDied("the hf engine is not running: it was closed, or start() was not called.")
        return self._compute

    def _run_interrupts(self) -> None:
        """Run the actions that wait for the gap between two decode steps. Called in the compute thread only."""
        if self._closing.is_set():
            raise WorkerDied("the hf engine was closed with this group in flight.")
        while self._interrupts:
            action, done = self._interrupts.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                action()
            except WeightError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _open_checked(self, publication: Publication) -> MappedWeights:
        """Open the publication, with its checksums verified and tensors compared to the model's. Raises
        `WeightError`."""
        mapped = MappedWeights(publication, self._spec.prefix)
        mapped.verify_once()
        state = self._replaceable_tensors()
        missing: list[str] = []
        if self._adapter is None:
            shapes = {name: place.shape for name, place in mapped.places.items()}
            tied = self._tied()
            missing = sorted(name for name in state if name not in shapes and name not in tied)
        else:
            layers = layer_shapes(mapped.manifest, self._adapter, self._spec.policies)
            shapes = {f"{layer}.weight": shape for layer, shape in layers.items()}
        strange = sorted(name for name, shape in shapes.items() if name not in state or state[name].shape != shape)
        if missing or strange:
            raise WeightError(
                f"{mapped.manifest.file}: not the model that the engine serves ({self._spec.model_path}): "
                f"lacks {missing[:5] or 'nothing'}, has unknown or misshapen {strange[:5] or 'nothing'}."
            )
        return mapped

    @torch.inference_mode()
    def _exchange(self, mapped: MappedWeights, version: int) -> None:
        began = time.perf_counter()
        if self._adapter is None:
            with self._adapters.base_weights():
                state = self._replaceable_tensors()
                for name, tensor in mapped.tensors():
                    state[name].copy_(tensor)
        else:
            for policy in self._spec.policies or ("",):
                scale = self._adapter.alpha / self._adapter.rank
                self._adapters.publish(policy, published_factors(mapped, policy), scale)
        self._version = version
        if self._num_in_flight:
            self._paused_s += time.perf_counter() - began

    def _tied(self) -> set[str]:
        """Names in publications of tied tensors, which a publication need not contain."""
        names = getattr(self.model, "all_tied_weights_keys", None) or ()
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        return {part.name for name in names for part in self._form.parts(name, shapes[name])}

    def _replaceable_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a publication may replace, by its names: views of the model's tensors, or these themselves
        where adapters are published."""
        state = self.model.state_dict()
        if self._adapter is not None:
            return state
        return {
            part.name: tensor.view(-1)[part.first : part.first + part.num_elements].view(part.shape)
            for name, tensor in state.items()
            for part in self._form.parts(name, tuple(tensor.shape))
        }


def make(spec: EngineSpec, meters: Meters | None = None) -> HfEngine:
    """Make the engine. It has no statistics of its own for `meters`."""
    return HfEngine(spec)
