"""Decodes the requests of training clients: what is to be carried out on an adapter.

    ForwardBackwardRequest (protobuf, or JSON before 0.30)  ─▶ ForwardCall
    OptimStepRequest, SaveWeights…, LoadWeights, CreateModel ─▶ OptimCall, SaveCall, LoadCall, CreateCall

What the server does not do is refused by name: `BadRequest` names the field.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.orchestrator.serve.wire.messages import (
    PROTOBUF,
    array_of_fields,
    array_of_message,
    parsed_message,
    token_array,
)
from penstock.workers.gateway.http.errors import BadRequest
from penstock.workers.gateway.http.fields import Fields, parsed
from penstock.workers.training_calls import WHOLE, AdamParams, AdapterSpec, Datum, LossCall

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

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.token_ids) for datum in self.data)


@dataclass(frozen=True)
class OptimCall:
    params: AdamParams


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
    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class CreateCall:
    """Make an adapter. `path`: checkpoint that it goes on from."""

    spec: AdapterSpec | None
    """None: that of the checkpoint."""
    path: str | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class UnloadCall:
    pass


Call = ForwardCall | OptimCall | SaveCall | LoadCall | CreateCall | UnloadCall


@dataclass(frozen=True)
class Address:
    """The training client and the number of a request in it."""

    model_id: str
    seq: int


def forward_address(body: bytes, content_type: str) -> tuple[Address, bytes]:
    """Whose request it is, and the bytes that are the same in every retry of it."""
    if content_type.startswith(PROTOBUF):
        message = parsed_message("ForwardBackwardRequest", body)
        return Address(message.model_id, message.seq_id), message.SerializeToString(deterministic=True)
    return address(parsed(body)), body


def address(fields: Fields) -> Address:
    seq = fields.whole("seq_id", 1)
    if seq is None:
        raise fields.wrong("seq_id", "is missing: requests of a training client are numbered from 1.")
    return Address(fields.need_text("model_id"), seq)


def forward_call(body: bytes, content_type: str, *, backward: bool) -> ForwardCall:
    """`backward`: what a request in JSON asks for; one in protobuf says it itself."""
    if content_type.startswith(PROTOBUF):
        return _call_of_message(parsed_message("ForwardBackwardRequest", body))
    fields = parsed(body)
    given = fields.need_object("forward_backward_input" if backward else "forward_input")
    config = given.object("loss_fn_config")
    numbers = {name: _config_number(name, value) for name, value in (config.value if config else {}).items()}
    data = [_datum_of_fields(datum) for datum in given.need_objects("data")]
    return ForwardCall(data, LossCall(_loss(given.need_text("loss_fn")), numbers), backward)


def optim_call(fields: Fields) -> OptimCall:
    other = fields.object("optimizer_params") or fields.object("optim_params")
    if other is not None and other.raw("type") not in (None, "adamw"):
        raise fields.wrong("optimizer_params", f"{other.raw('type')!r} is not done here: send AdamParams.")
    given = fields.object("adam_params") or other or fields.need_object("adam_params")
    default = AdamParams()
    one_less = math.nextafter(1, 0)
    bounds = {"learning_rate": math.inf, "beta1": one_less, "beta2": one_less, "eps": math.inf,
              "weight_decay": math.inf, "grad_clip_norm": math.inf}  # fmt: skip
    unknown = set(given.value) - {*bounds, "type"}
    if unknown:
        raise given.wrong(min(unknown), f"is unknown: AdamParams has {sorted(bounds)}.")
    found = {name: given.number(name, 0, high) for name, high in bounds.items()}
    return OptimCall(AdamParams(**{name: getattr(default, name) if value is None else value
                                   for name, value in found.items()}))  # fmt: skip


def create_call(fields: Fields, max_rank: int, seed: int) -> CreateCall:
    """`seed`: for a request that has none."""
    refuse_optimizer(fields)
    given = fields.object("lora_config")
    if given is None:
        raise fields.wrong("lora_config", "is missing: this server trains LoRA adapters.")
    if max_rank == WHOLE:
        for name in ("train_attn", "train_mlp", "train_unembed"):
            given.refuse(name, "this server trains all weights (serve.full): leave it out.", True)
        return CreateCall(AdapterSpec(WHOLE))
    rank = given.whole("rank", 1)
    if rank is None or rank > max_rank:
        raise given.wrong("rank", f"must be from 1 to {max_rank} (serve.max_rank), not {rank}.")
    asked = given.whole("seed", 0)
    flags = {name: name not in given or given.flag(name) for name in ("train_attn", "train_mlp", "train_unembed")}
    if not any(flags.values()):
        raise given.wrong("train_attn", "nothing is trained: one of train_attn, train_mlp, train_unembed is true.")
    return CreateCall(AdapterSpec(rank, seed if asked is None else asked, **flags))


def load_call(fields: Fields) -> LoadCall:
    refuse_optimizer(fields)
    return LoadCall(fields.need_text("path"), fields.flag("optimizer"))


def refuse_optimizer(fields: Fields) -> None:
    fields.refuse("weights_access_token", "weights of others are not loaded here: leave it out.")
    config = fields.object("optimizer_config")
    if config is not None and config.raw("type") not in (None, "adamw"):
        raise config.wrong("type", f"{config.raw('type')!r} is not done here: the optimizer is adamw.")


def save_call(fields: Fields, *, is_sampler: bool) -> SaveCall:
    name = fields.text("path")
    if name is not None and not NAME.fullmatch(name):
        raise fields.wrong("path", f"{name[:60]!r} must be a name of letters, digits, dots, dashes and underscores.")
    if fields.raw("kind") not in (None, "snapshot"):
        raise fields.wrong("kind", "inflight weights are not done here: use kind='snapshot', the default.")
    seq = fields.whole("sampling_session_seq_id", 0)
    if is_sampler and name is None and seq is None:
        raise fields.wrong("sampling_session_seq_id", "is missing, as is path.")
    ttl_s, metadata = fields.whole("ttl_seconds", 1), fields.object("user_metadata")
    kept = {str(key): str(value) for key, value in metadata.value.items()} if metadata else None
    return SaveCall(name, is_sampler, fields.flag("overwrite"), seq, kept, ttl_s)


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
            raise _no_chunk(str(kind), f"{path}.model_input")
        tokens.append(token_array(chunk.encoded_text.tokens, f"{path}.model_input"))
    inputs = {name: array_of_message(value, f"{path}.loss_fn_inputs.{name}")
              for name, value in datum.loss_fn_inputs.items()}  # fmt: skip
    return _datum(np.concatenate(tokens) if tokens else np.empty(0, np.int32), inputs, path)


def _datum_of_fields(fields: Fields) -> Datum:
    tokens = text_tokens(fields.need_object("model_input"))
    inputs = fields.need_object("loss_fn_inputs")
    arrays = {name: array_of_fields(inputs.need_object(name)) for name in inputs.value}
    return _datum(np.asarray(tokens, np.int32), arrays, fields.path)


def text_tokens(model_input: Fields) -> list[int]:
    """The tokens of a model's input in JSON, which is text alone."""
    found: list[int] = []
    for chunk in model_input.objects("chunks"):
        if chunk.raw("type") != "encoded_text":
            raise _no_chunk(str(chunk.raw("type")), chunk.path)
        tokens = chunk.raw("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise chunk.wrong("tokens", "must be a list of tokens.")
        found.extend(tokens)
    return found


def _no_chunk(kind: str, path: str) -> BadRequest:
    return BadRequest(f"a chunk of {kind} is not read here: send text (encoded_text) alone.", path)


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
