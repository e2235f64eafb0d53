"""A rollout engine on plain transformers: for machines without a vLLM build, and as a reference that is easy to
understand.

`generate` computes one group by itself (one prefill, then n rows without padding), so its result depends on the prompt,
the seed and the weights alone: not on what else runs, nor on when. All compute happens in one thread, group after
group; the event loop stays free. Where adapters are published it adds them to the weights that it started with. `load`
runs between two decode steps: tokens sampled afterwards carry the new version, and the KV cache of the tokens before
stays as it was. `generate_group` is the synchronous core, for straight-line programs. `sample` does the same with one
of many adapters, which come by name and are exchanged between groups (`hf_adapters.py`).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from penstock.conf.errors import DataError, DeadlineExceeded, ModelError, WeightError, WorkerDied
from penstock.workers.calls.sample_calls import SampleCall, SampleOutput
from penstock.workers.calls.training_calls import AdapterState
from penstock.workers.pictures.families import auto_class
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.pictures.processor import PictureProcessor, check_seen
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampled, Sampling
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.hf_adapters import HfAdapters
from penstock.workers.rollout.hf_group import Request, Response
from penstock.workers.rollout.hf_pictures import SeenPrompt
from penstock.workers.rollout.nonfinite import nonfinite
from penstock.workers.rollout.prompt_scores import PromptScores, asks_of_prompt, check_call, room_after, score_prompt
from penstock.workers.rollout.sampling import choose_tokens, draw_uniforms, sampling_logprobs
from penstock.workers.routed_experts import RoutingRecorder
from penstock.workers.weights.checkpoint_form import CheckpointForm
from penstock.workers.weights.publication.adapter import deltas, layer_shapes
from penstock.workers.weights.publication.reading import MappedWeights, open_publication
from penstock.workers.weights.stored import check_model

T = TypeVar("T")


class HfEngine:
    """Lifecycle: `start`, then `generate` and `load` in any order and concurrency, then `close`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._config, self._adapter = spec, spec.config, spec.adapter
        self._version = spec.version
        self._base: dict[str, torch.Tensor] = {}
        """Starting weights that adapters change."""
        self.model: Any = None
        self._form = CheckpointForm(None)
        self._adapters = HfAdapters(None, spec.adapters)
        self._processor: PictureProcessor | None = None
        """Processor of the model's pictures; None for a model of text."""
        self._banned: tuple[int, ...] = ()
        """Tokens that are never sampled."""
        self._recorder: RoutingRecorder | None = None
        self._detokenizer = NO_TOKENIZER
        self._eos_ids: frozenset[int] = frozenset()
        self._interrupts: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._num_tokens = self._num_in_flight = self._tokens_in_flight = 0
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
        return await self._computed(group, num_samples, sampling)

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, as `AdapterEngine` says it: the same bits for the same call and adapter."""
        self._executor()
        check_call(call, self.model.config.get_text_config().vocab_size)
        group = partial(self._sample_group, self._adapters.find(adapter), call)
        return await self._computed(group, call.num_samples, call.sampling)

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        self._executor()
        await asyncio.to_thread(self._adapters.add, name, state)

    async def drop_adapter(self, name: str) -> None:
        self._executor()
        self._adapters.drop(name)

    def adapters(self) -> list[str]:
        return self._adapters.names()

    async def _computed(self, group: Callable[..., T], num_samples: int, sampling: Sampling) -> T:
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
        executor = self._executor()
        mapped = await asyncio.to_thread(self._checked, publication)
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

    async def nonfinite_weights(self) -> list[str]:
        look = partial(nonfinite, self.model)
        return await asyncio.get_running_loop().run_in_executor(self._executor(), look)

    async def sleep(self) -> None:
        """Leave the device: on a GPU the model goes to the host's memory."""
        executor = self._executor()
        self._awake.clear()
        if self._config.num_gpus_per_worker:
            await asyncio.get_running_loop().run_in_executor(executor, self._leave)

    async def wake(self) -> None:
        executor = self._executor()
        if self._config.num_gpus_per_worker:
            await asyncio.get_running_loop().run_in_executor(executor, self.model.to, "cuda")
        self._awake.set()

    def _leave(self) -> None:
        with self._adapters.set_aside():
            self.model.to("cpu")

    async def version(self) -> int:
        return self._version

    def sampled(self) -> Sampled:
        return Sampled(self._num_tokens, self._num_in_flight, self._tokens_in_flight)

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

        torch.set_num_threads(
            self._spec.num_threads
        )  # holds for the calling thread, so it is set in the one that computes
        dtype = getattr(torch, self._config.dtype)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._spec.model_path)
            self._processor = PictureProcessor.if_it_sees(self._spec.model_path, self._spec.picture_digest)
            kind = auto_class(AutoConfig.from_pretrained(self._spec.model_path))
            check_model(self._spec.model_path)
            self.model = kind.from_pretrained(self._spec.model_path, dtype=dtype).eval()
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path={self._spec.model_path}: the hf engine cannot load it: {error}") from None
        self._detokenizer = Detokenizer(tokenizer)
        self._banned = () if self._processor is None else self._processor.token_ids
        self._form = CheckpointForm(self.model)
        self._adapters = HfAdapters(self.model, self._spec.adapters)
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
        self._adapters.use(None)
        stop_ids = self._detokenizer.stop_ids(sampling.stop)
        request = Request(prompt_ids, num_samples, sampling, pictures, is_over, stop_ids)
        return [self._completion(response) for response in self._responses(request)]

    @torch.inference_mode()
    def _sample_group(self, state: AdapterState | None, call: SampleCall, is_over: threading.Event) -> SampleOutput:
        """Answer a call in this thread."""
        self._adapters.use(state)
        stop_ids = self._detokenizer.stop_ids(call.sampling.stop) | {*call.stop_ids}
        request = Request(
            call.prompt_ids, call.num_samples, call.sampling, call.pictures, is_over, stop_ids, call.topk_logprobs,
        )  # fmt: skip
        self._room(call.prompt_ids, call.sampling)
        scores = PromptScores()
        if asks_of_prompt(call):
            inputs, _ = self._inputs(request)
            scores = score_prompt(self.model(**inputs).logits[0], call)
            if self._recorder is not None:
                self._recorder.take()
        samples = [response.sampled(call.topk_logprobs) for response in self._responses(request)]
        return SampleOutput(samples, scores.logprobs, scores.top, scores.targets)

    def _inputs(self, request: Request) -> tuple[dict[str, torch.Tensor], SeenPrompt | None]:
        """Arguments of the forward pass of the prompt, and what is seen in it."""
        prompt_ids, pictures = request.prompt_ids, request.pictures
        check_seen(self._processor, pictures, self._config.max_pictures, self._spec.model_path)
        seen = None if self._processor is None else SeenPrompt.of(self.model, self._processor, prompt_ids, pictures)
        inputs = {"input_ids": torch.tensor([list(prompt_ids)], device=self.model.device)}
        return inputs | ({} if seen is None else dict(seen.inputs)), seen

    def _responses(self, request: Request) -> list[Response]:
        """Sample the responses to one prompt under the weights that the model has now."""
        from transformers import DynamicCache

        num_samples, sampling, is_over = request.num_samples, request.sampling, request.is_over
        num_tokens = self._room(request.prompt_ids, sampling)
        uniforms = None if sampling.temperature == 0 else draw_uniforms(num_samples, num_tokens, sampling.seed)
        responses = [Response() for _ in range(num_samples)]
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
        return min(sampling.max_tokens, room_after(prompt_ids, self._config.max_model_len))

    def _extend(
        self, responses: list[Response], chosen_B: torch.Tensor, logprobs_BV: torch.Tensor, request: Request
    ) -> None:
        """Add a token to each response that is not done, and note which of them end with it."""
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

    def _completion(self, response: Response) -> Completion:
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

    def _checked(self, publication: Publication) -> MappedWeights:
        """Open the publication, with its checksums verified and tensors compared to the model's. Raises
        `WeightError`."""
        mapped = MappedWeights(open_publication(publication))
        mapped.verify()
        state = self._places()
        missing: list[str] = []
        if self._adapter is None:
            shapes = {name: place.shape for name, place in mapped.manifest.layout.by_name.items()}
            tied = self._tied()
            missing = sorted(name for name in state if name not in shapes and name not in tied)
        else:
            layers = layer_shapes(mapped.manifest, self._adapter)
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
        with self._adapters.set_aside():
            state = self._places()
            for name, tensor in mapped.tensors() if self._adapter is None else self._merged(mapped, state):
                state[name].copy_(tensor)
        self._version = version

    def _tied(self) -> set[str]:
        """Names in publications of tensors that are another one's, and need not be there."""
        names = getattr(self.model, "all_tied_weights_keys", None) or ()
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        return {part.name for name in names for part in self._form.parts(name, shapes[name])}

    def _places(self) -> dict[str, torch.Tensor]:
        """What a publication may replace, by its names there: views of the model's tensors, or where adapters come
        those themselves."""
        state = self.model.state_dict()
        if self._adapter is not None:
            return state
        return {
            part.name: tensor.view(-1)[part.first : part.first + part.num_elements].view(part.shape)
            for name, tensor in state.items()
            for part in self._form.parts(name, tuple(tensor.shape))
        }

    def _merged(self, mapped: MappedWeights, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The changed weights, float32: the starting ones, which are kept for it, plus the adapter's share."""
        assert self._adapter is not None
        for layer, delta in deltas(mapped, self._adapter):
            name = f"{layer}.weight"
            if name not in self._base:
                self._base[name] = state[name].clone()
            yield name, self._base[name] + delta.to(self._base[name].device)
