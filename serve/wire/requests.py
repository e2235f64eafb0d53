"""Decodes requests: what is to be carried out on an adapter, and calls for the engines.

    ForwardBackwardRequest (protobuf, or JSON before 0.30)  ─▶ ForwardCall
    OptimStepRequest, SaveWeights…, LoadWeights, CreateModel ─▶ AdamParams, SaveCall, LoadCall, AdapterSpec
    SampleRequest (JSON)                                     ─▶ SampleRequest

What the server and its engines do not do is refused by name: `BadRequest` names the field.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.serve.wire.bodies import (
    Body,
    DatumBody,
    ForwardBody,
    Numbered,
    SampleBody,
    SamplingParams,
    Tensor,
    no_chunk,
    read,
)
from penstock.serve.wire.messages import (
    PROTOBUF,
    array_of_body,
    array_of_message,
    check_fields,
    numbers,
    parsed_message,
)
from penstock.workers.calls.sample_calls import SampleCall
from penstock.workers.calls.training_calls import WHOLE, AdamParams, AdapterSpec, Datum, LossCall
from penstock.workers.gateway.http.errors import BadRequest
from penstock.workers.protocols import Sampling

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
COLUMNS = ("weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REFUSED_LOSSES = {
    "stable_reinforce": "its formula is not public. Use importance_sampling, ppo, cispo, dro or gspo.",
    "custom": "custom losses run in the client here: call forward_backward_custom with the function itself.",
}


@dataclass(frozen=True)
class ForwardCall:
    data: list[Datum]
    loss: LossCall
    backward: bool


@dataclass(frozen=True)
class SaveCall:
    """Save weights. Unnamed ones are for a sampling session alone."""

    name: str | None
    is_sampler: bool
    overwrite: bool = False
    sampling_seq: int | None = None
    metadata: dict[str, str] | None = None
    ttl_s: int | None = None


@dataclass(frozen=True)
class LoadCall:
    """Replace the adapter by a checkpoint, or make one of it."""

    path: str
    with_optimizer: bool


Call = ForwardCall | AdamParams | SaveCall | LoadCall | AdapterSpec
"""`AdapterSpec`: make an adapter."""


def numbered(body: bytes, content_type: str) -> tuple[Numbered, bytes, int]:
    """A request's number and whose it is, the bytes that are the same in every retry of it, and the tokens that it
    costs: 1 without data, or if it will be refused in its turn. Raises `BadRequest`, `TooLarge`."""
    if content_type.startswith(PROTOBUF):
        check_fields("ForwardBackwardRequest", body)
        message = parsed_message("ForwardBackwardRequest", body)
        found = Numbered(model_id=message.model_id, seq_id=message.seq_id)
        num_bytes = sum(len(chunk.encoded_text.tokens) for datum in message.data for chunk in datum.model_input)
        return found, message.SerializeToString(deterministic=True), max(1, num_bytes // 4)
    found, tokens = read(Numbered, body), 0
    with contextlib.suppress(BadRequest):
        asked = read(ForwardBody, body)
        given = asked.forward_input or asked.forward_backward_input
        chunks = [chunk for datum in given.data for chunk in datum.model_input.chunks] if given else []
        tokens = sum(len(chunk.tokens or ()) for chunk in chunks)
    return found, body, max(1, tokens)


def forward_call(body: bytes, content_type: str, *, backward: bool) -> ForwardCall:
    """`backward`: what a request in JSON asks for; one in protobuf says it itself."""
    if content_type.startswith(PROTOBUF):
        return _call_of_message(parsed_message("ForwardBackwardRequest", body))
    asked = read(ForwardBody, body)
    given = asked.forward_backward_input if backward else asked.forward_input
    if given is None:
        raise BadRequest("is missing.", "forward_backward_input" if backward else "forward_input")
    data = [_datum_of_body(datum, f"data[{index}]") for index, datum in enumerate(given.data)]
    return ForwardCall(data, LossCall(_loss(given.loss_fn), given.loss_fn_config or {}), backward)


def optim_call(body: Body) -> AdamParams:
    given = body.optimizer_params or body.optim_params or body.need("adam_params")
    return AdamParams(**msgspec.structs.asdict(given))


def adapter_spec(body: Body, max_rank: int, seed: int) -> AdapterSpec:
    """`seed`: for a request that has none."""
    given = body.need("lora_config")
    flags = {name: getattr(given, name) is not False for name in ("train_attn", "train_mlp", "train_unembed")}
    if max_rank == WHOLE:
        for name in (name for name, is_set in flags.items() if not is_set):
            raise BadRequest("this server trains all weights (serve.full): leave it out.", f"lora_config.{name}")
        return AdapterSpec(WHOLE)
    if given.rank is None or not 1 <= given.rank <= max_rank:
        raise BadRequest(f"must be from 1 to {max_rank} (serve.max_rank), not {given.rank}.", "lora_config.rank")
    if not any(flags.values()):
        raise BadRequest("nothing is trained: one of train_attn, train_mlp, train_unembed is true.", "lora_config")
    return AdapterSpec(given.rank, seed if given.seed is None else given.seed, **flags)


def load_call(body: Body) -> LoadCall:
    return LoadCall(body.need("path"), bool(body.optimizer))


def save_call(body: Body, *, is_sampler: bool) -> SaveCall:
    name, seq = body.path, body.sampling_session_seq_id
    if name is not None and not NAME.fullmatch(name):
        raise BadRequest(f"{name[:60]!r} must be a name of letters, digits, dots, dashes and underscores.", "path")
    if is_sampler and name is None:
        body.need("sampling_session_seq_id")
    kept = {key: str(value) for key, value in (body.metadata or {}).items()} or None
    return SaveCall(name, is_sampler, bool(body.overwrite), seq, kept, body.ttl_seconds)


def _call_of_message(message: Any) -> ForwardCall:
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = _config_number(name, value.text if value.WhichOneof("value") == "text" else value.number)
    if not message.data:
        raise BadRequest("is missing or empty.", "data")
    data = [_datum_of_message(datum, f"data[{index}]") for index, datum in enumerate(message.data)]
    return ForwardCall(data, LossCall(_loss(message.loss_fn), config), not message.forward_only)


def _loss(name: str) -> str:
    if name not in LOSSES:
        why = _REFUSED_LOSSES.get(name, f"there is no such loss. Losses: {', '.join(LOSSES)}.")
        raise BadRequest(f"{name!r}: {why}", "loss_fn")
    return name


def _config_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"must be a number, not {value!r}.", f"loss_fn_config.{name}")
    return float(value)


def _datum_of_message(datum: Any, path: str) -> Datum:
    tokens = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise no_chunk(str(kind), f"{path}.model_input")
        tokens.append(numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{path}.model_input"))
    inputs = {name: array_of_message(value, f"{path}.loss_fn_inputs.{name}")
              for name, value in datum.loss_fn_inputs.items()}  # fmt: skip
    return _datum(np.concatenate(tokens) if tokens else np.empty(0, np.int32), inputs, path)


def _datum_of_body(datum: DatumBody, path: str) -> Datum:
    tokens = np.asarray(datum.model_input.tokens(f"{path}.model_input"), np.int32)
    arrays = {name: array_of_body(tensor, f"{path}.loss_fn_inputs.{name}")
              for name, tensor in datum.loss_fn_inputs.items()}  # fmt: skip
    return _datum(tokens, arrays, path)


def _datum(tokens: np.ndarray, inputs: dict[str, np.ndarray], path: str) -> Datum:
    if not len(tokens):
        raise BadRequest("has no token.", f"{path}.model_input")
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise BadRequest("is missing.", f"{path}.loss_fn_inputs.target_tokens")
    if targets.dtype.kind != "i" or targets.ndim not in (1, 2) or len(targets) != len(tokens):
        text = f"must be int64 of shape [{len(tokens)}] or [{len(tokens)}, K], not {targets.dtype} {targets.shape}."
        raise BadRequest(text, f"{path}.loss_fn_inputs.target_tokens")
    for name, value in inputs.items():
        if name not in COLUMNS:
            raise BadRequest(f"is unknown: inputs are target_tokens, {', '.join(COLUMNS)}.", f"{path}.{name}")
        if value.shape != targets.shape:
            raise BadRequest(f"has shape {value.shape}, target_tokens {targets.shape}.", f"{path}.{name}")
    columns = {name: value.astype(np.float32) for name, value in inputs.items()}
    return Datum(tokens.astype(np.int32), targets.astype(np.int64), columns)


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples, with what the encoder of its result needs."""

    call: SampleCall
    last_logprobs: int | None = None
    """Number of the prompt's last tokens whose log-probability is told; None: all."""
    is_sparse: bool = False
    """Whether `target_prompt_logprobs` came as a sparse tensor, and goes back as one."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it costs at most."""
        return len(self.call.prompt_ids) + self.call.num_samples * self.call.sampling.max_tokens


def sample_request(body: bytes, max_length: int, default_seed: int) -> SampleRequest:
    """`max_length`: tokens of the longest sequence. `default_seed`: for a request that has none."""
    asked = read(SampleBody, body)
    prompt = asked.prompt.tokens("prompt")
    if not prompt:
        raise BadRequest("has no token.", "prompt")
    if asked.record_stability_info:
        raise BadRequest("stable_reinforce is not done here: leave it out.", "record_stability_info")
    if asked.prompt_logprobs_last_n is not None and not asked.prompt_logprobs:
        raise BadRequest("needs prompt_logprobs.", "prompt_logprobs_last_n")
    sampling, stop_ids = _sampling(asked.sampling_params, max(1, max_length - len(prompt)), default_seed)
    targets = asked.target_prompt_logprobs
    call = SampleCall(
        prompt, asked.num_samples or 1, sampling, stop_ids, bool(asked.prompt_logprobs),
        asked.topk_prompt_logprobs or 0, _targets(targets, len(prompt)), asked.topk_sample_logprobs or 0,
    )  # fmt: skip
    is_sparse = targets is not None and targets.sparse_crow_indices is not None
    return SampleRequest(call, asked.prompt_logprobs_last_n, is_sparse)


def _sampling(given: SamplingParams, room: int, default_seed: int) -> tuple[Sampling, tuple[int, ...]]:
    stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    stop_ids = tuple(stop for stop in stops if isinstance(stop, int))
    if (texts and stop_ids) or not all(texts):
        raise BadRequest("must be texts that are not empty, or tokens.", "sampling_params.stop")
    sampling = Sampling(
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=max(0, given.top_k or 0),
        max_tokens=min(given.max_tokens or room, room),
        stop=texts,
        seed=default_seed if given.seed is None else given.seed % 2**31,
    )
    return sampling, stop_ids


def _targets(tensor: Tensor | None, num_prompt: int) -> np.ndarray | None:
    if tensor is None:
        return None
    name = "target_prompt_logprobs"
    found = array_of_body(tensor, name, absent=-1)
    if found.dtype.kind != "i" or found.ndim != 2 or len(found) != num_prompt - 1:
        text = f"must be int64 of shape [{num_prompt - 1}, K], not {found.dtype} {found.shape}."
        raise BadRequest(text, f"{name}.shape")
    return found
