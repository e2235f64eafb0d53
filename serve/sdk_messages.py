"""What the Tinker SDK sends and reads, and plain data: requests are decoded here, results encoded. Pure.

    ForwardBackwardRequest (protobuf, or JSON before 0.30)   ─▶ ForwardCall      ForwardOutput ─▶ protobuf
    OptimStepRequest, SaveWeights…, LoadWeights, CreateModel ─▶ AdamParams, SaveCall, LoadCall, AdapterSpec
    SampleRequest (JSON)                                     ─▶ SampleRequest    SampleOutput ─▶ protobuf, all else JSON

What the server and its engines do not do is refused by name: `BadRequest` names the field. Requests in JSON are read as
types: a field of another type is refused by name, and one that no type has is skipped and not built. The protobuf
messages are those of the installed `tinker` wheel: its one module of messages is loaded when the first one is needed,
and nothing else of it. What a request costs before it is accepted is bounded by its size.

A tensor comes in one of two forms, dense or sparse (CSR, for `[T, K]` targets with few entries that are not zero), as
protobuf with bytes or as JSON with numbers. Here both become numpy arrays. Legend: T tokens, K per token.
"""

import contextlib
import importlib
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from itertools import groupby
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from penstock.conf.errors import ConfigError, PenstockError
from penstock.orchestrator.loops.verbs import NAME
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import (
    WHOLE,
    AdamParams,
    AdapterSpec,
    Datum,
    ForwardOutput,
    LossCall,
    SampleCall,
    SampleOutput,
    Sampling,
    TopTokens,
)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
LARGEST_TENSOR = 2**28
"""Most elements of a tensor, so that a small sparse one cannot ask for all memory."""
PLAIN_BYTES = 2**20
"""Largest body of a request without data."""
MOST_RATIO = 100
"""Factor by which a body beyond `PLAIN_BYTES` may grow when it is unpacked: data of real sequences shrink to a tenth at
most."""
MOST_KEYS, MOST_VALUES, MOST_FIELDS = 2**16, 2**20, 2**17
"""Most names and values of a body in JSON, and fields of one in protobuf: decoding them blocks all other requests. The
SDK's 1024 sequences have 30,000 names or fields."""
METADATA_BYTES = 2**14
MOST_SAMPLES = 1024
Kind = TypeVar("Kind", bound=Struct)
Number = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Likely = Annotated[int, Meta(ge=0, le=100)]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
COLUMNS = ("weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
_REFUSED_LOSSES = {
    "stable_reinforce": "its formula is not public. Use importance_sampling, ppo, cispo, dro or gspo.",
    "custom": "custom losses run in the client here: call forward_backward_custom with the function itself.",
}
_MASKED = -99999.0
"""Log-probability in a cell of the most likely tokens that says nothing."""


class TooLarge(PenstockError):
    """A body beyond its bound."""


class Lora(Struct):
    rank: int | None = None
    seed: Number | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class Adam(Struct, tag_field="type", tag="adamw", forbid_unknown_fields=True):
    learning_rate: NotNegative = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: NotNegative = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class Optimizer(Struct, tag_field="type", tag="adamw"):
    """The one optimizer that there is."""


class Numbered(Struct):
    """A request's number and owner. Null counts as an absent field."""

    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: Number | None = None

    def need(self, name: str) -> Any:
        """A required field. Raises `BadRequest`."""
        value = getattr(self, name)
        if value is None:
            raise BadRequest("is missing.", name)
        return value


class Body(Numbered):
    """A request without data: the fields of all of them."""

    request_id: str | None = None
    model_seq_id: Number | None = None
    sampling_session_seq_id: Number | None = None
    base_model: str | None = None
    model_path: str | None = None
    tinker_path: str | None = None
    path: str | None = None
    display_name: str | None = None
    user_metadata: msgspec.Raw = msgspec.Raw(b"null")
    lora_config: Lora | None = None
    optimizer_config: Optimizer | None = None
    adam_params: Adam | None = None
    optimizer_params: Adam | None = None
    optim_params: Adam | None = None
    optimizer: bool | None = None
    overwrite: bool | None = None
    ttl_seconds: Positive | None = None
    kind: Literal["snapshot"] | None = None
    """Weights that follow the training (inflight) are not done here."""
    weights_access_token: None = None
    """Weights of others are not loaded here."""
    allow_metadata_only: bool | None = None

    def __post_init__(self) -> None:
        texts = self.display_name, self.base_model, self.path, self.model_path
        if len(bytes(self.user_metadata)) + sum(len(text or "") for text in texts) > METADATA_BYTES:
            raise ValueError(f"user_metadata, names and paths have more than {METADATA_BYTES:,} bytes")
        if bytes(self.user_metadata)[:1] not in (b"{", b"n"):
            raise ValueError("user_metadata is no object")

    @property
    def metadata(self) -> dict[str, Any] | None:
        return msgspec.json.decode(self.user_metadata, type=dict[str, Any] | None)


class Tensor(Struct, gc=False):
    dtype: Literal["float32", "int64"]
    data: list[int | float]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class ChunkBody(Struct, gc=False):
    type: str
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None


class ModelInput(Struct, gc=False):
    chunks: list[ChunkBody]

    def tokens(self, path: str) -> list[int]:
        """The tokens of what a model reads, which is text alone. Raises `BadRequest`."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text" or chunk.tokens is None:
                raise unsupported_chunk(chunk.type, path)
        return [token for chunk in self.chunks for token in chunk.tokens or ()]


class DatumBody(Struct, gc=False):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]


class ForwardInput(Struct):
    data: Annotated[list[DatumBody], Meta(min_length=1)]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class ForwardBody(Struct):
    """A forward pass, as SDKs before 0.30 ask for it."""

    forward_input: ForwardInput | None = None
    forward_backward_input: ForwardInput | None = None


class SamplingParams(Struct, forbid_unknown_fields=True):
    """Other parameters would change the distribution, and are refused."""

    max_tokens: Positive | None = None
    seed: Number | None = None
    stop: str | list[int | str] | None = None
    temperature: NotNegative | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None


class SampleBody(Struct):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Positive | None = None
    topk_prompt_logprobs: Likely | None = None
    topk_sample_logprobs: Likely | None = None
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Literal[0] | None = None
    """Draws at prompt tokens are not done here."""
    record_stability_info: bool | None = None


def read(kind: type[Kind], body: bytes) -> Kind:
    """A request in JSON. Raises `BadRequest`, `TooLarge`."""
    if body.count(b":") > MOST_KEYS or body.count(b",") > MOST_VALUES:
        raise TooLarge(f"the body has more than {MOST_KEYS:,} names or {MOST_VALUES:,} values. Send less at once.")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise BadRequest(f"{text}.", place.strip(".`")) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}.") from None


def check_size(num_bytes: int, limit_bytes: int) -> None:
    """Raise `TooLarge` for a body beyond its bound."""
    if num_bytes > limit_bytes:
        raise TooLarge(f"the body is larger than {limit_bytes:,} bytes: serve.max_body_mib bounds bodies with data, 1 "
                       f"MiB all others, {MOST_RATIO} times its size what is packed. Send less at once.")  # fmt: skip


def unsupported_chunk(kind: str, path: str) -> BadRequest:
    return BadRequest(f"a chunk of {kind} is not read here: send text (encoded_text) alone.", path)


@cache
def messages() -> Any:
    """The module of the messages. Raises `ConfigError` without the extra."""
    try:
        file = importlib.metadata.distribution("tinker").locate_file("tinker/proto/tinker_public_pb2.py")
        loader = SourceFileLoader("penstock_tinker_messages", str(file))
        module = ModuleType(loader.name)
        loader.exec_module(module)
        importlib.import_module("zstandard")  # which bodies are packed by
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(
            f"{error}: the server speaks the messages of the Tinker SDK, which come with the extra: pip install "
            "'penstock[serve]'."
        ) from None
    return module


def decompress(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body of a request as it was before its `Content-Encoding`. Raises `BadRequest`, `TooLarge`."""
    import zstandard

    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding!r} is unknown: send zstd, or none.")
    limit_bytes = min(limit_bytes, max(PLAIN_BYTES, MOST_RATIO * len(body)))
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            data: bytes = reader.read(limit_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadRequest(f"the body is no zstd: {error}.") from None
    check_size(len(data), limit_bytes)
    return data


def check_fields(name: str, body: bytes) -> None:
    """Raise `TooLarge` for a large message of many small fields, whose parsing would block all other requests."""
    kind = getattr(messages(), name).DESCRIPTOR
    try:
        if len(body) > PLAIN_BYTES and _num_fields(memoryview(body), kind) > MOST_FIELDS:
            raise TooLarge(f"the body has more than {MOST_FIELDS:,} fields. Send fewer sequences at once.")
    except (IndexError, RecursionError):
        raise BadRequest(f"the body is no {name} in protobuf: it is torn.") from None


def _num_fields(data: memoryview, kind: Any) -> int:
    """Number of fields of a message and of those in it, up to `MOST_FIELDS` and one."""
    num = at = 0
    while at < len(data) and num <= MOST_FIELDS:
        tag, at = _varint(data, at)
        wire, num = tag & 7, num + 1
        if wire in (0, 2):
            value, at = _varint(data, at)
        if wire == 2:
            field = kind.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                num += _num_fields(data[at : at + value], field.message_type)
            at += value
        at += {1: 8, 5: 4}.get(wire, 0)
    return num


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of base 128, which has ten digits at most, and the offset behind it. Raises `IndexError`."""
    value = 0
    for place in range(10):
        digit = data[at + place]
        value |= (digit & 127) << 7 * place
        if digit < 128:
            return value, at + place + 1
    raise IndexError


def parse_message(name: str, body: bytes) -> Any:
    """A message of the SDK by the name of its type."""
    message = getattr(messages(), name)()
    try:
        message.ParseFromString(body)
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError has no public place that all versions share
        raise BadRequest(f"the body is no {name} in protobuf: {error}.") from None
    return message


def array_of_message(tensor: Any, field: str) -> np.ndarray:
    """The array of a `Tensor`: float32 or int64, of its shape."""
    pb = messages()
    dtypes = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
    if tensor.dtype not in dtypes:
        raise BadRequest("must be float32, int64 or int32.", field)
    dtype, shape = np.dtype(dtypes[tensor.dtype]), list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        rows, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
        found = _dense(numbers(csr.values, dtype, field), rows, columns, shape, field)
    else:
        found = _shaped(numbers(tensor.dense, dtype, field), shape or None, field)
    return found.astype(np.float32 if dtype.kind == "f" else np.int64)


def array_of_body(tensor: Tensor, field: str, absent: int = 0) -> np.ndarray:
    """The array of a tensor in JSON: float32 or int64, of its shape. `absent`: the value of gaps in a sparse one."""
    values = np.asarray(tensor.data)
    if len(values) and values.dtype.kind not in ("iuf" if tensor.dtype == "float32" else "iu"):
        raise BadRequest(f"must be numbers of {tensor.dtype}.", f"{field}.data")
    values = values.astype(tensor.dtype)
    if tensor.sparse_crow_indices is not None:
        rows, columns = np.asarray(tensor.sparse_crow_indices), np.asarray(tensor.sparse_col_indices or [], np.int64)
        return _dense(values, rows, columns, tensor.shape or [], field, absent)
    return _shaped(values, tensor.shape, field)


def tensor_message(value: np.ndarray, is_there: np.ndarray | None = None) -> Any:
    """A `Tensor` of real numbers: dense, or sparse with those of a matrix at the places that are there."""
    pb = messages()
    if is_there is None:
        return pb.Tensor(dense=value.astype("<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=list(value.shape))
    rows, columns = np.nonzero(is_there)
    starts = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))])
    csr = pb.SparseCsr(
        values=value[rows, columns].astype("<f4").tobytes(),
        crow_indices=starts.astype("<i8").tobytes(),
        col_indices=columns.astype("<i8").tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=list(value.shape))


def numbers(data: bytes, dtype: np.dtype[Any], field: str) -> np.ndarray:
    """The array that bytes are. Raises `BadRequest`."""
    if len(data) % dtype.itemsize:
        raise BadRequest(f"has {len(data)} bytes, which is no whole number of {dtype.name}.", field)
    return np.frombuffer(data, dtype)


def _shaped(values: np.ndarray, shape: list[int] | None, field: str) -> np.ndarray:
    if shape is None:
        return values
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != len(values):
        raise BadRequest(f"has {len(values)} values, which do not fill its shape {shape}.", field)
    return values.reshape(shape)


def _dense(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], field: str, absent: int = 0
) -> np.ndarray:
    """The matrix of a sparse tensor."""
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > LARGEST_TENSOR:
        raise BadRequest(f"a sparse tensor has two dimensions that fit in memory, not {shape}.", field)
    is_ordered = len(rows) == shape[0] + 1 and rows[0] == 0 and (np.diff(rows) >= 0).all() and rows[-1] == len(values)
    is_within = len(columns) == len(values) and ((columns >= 0) & (columns < shape[1])).all()
    if not is_ordered or not is_within:
        raise BadRequest("the indices of this sparse tensor do not fit its shape and values.", field)
    found = np.full(shape, absent, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found


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


_SAMPLING_NUMBER = re.compile(rb'"sampling_session_seq_id":\s*\d+')  # the SDK counts it on when it sends a save again


def numbered(body: bytes, content_type: str) -> tuple[Numbered, bytes, int]:
    """A request's number and whose it is, the bytes that are the same in every retry of it, and the tokens that it
    costs: 1 without data, or if it will be refused in its turn. Raises `BadRequest`, `TooLarge`."""
    if content_type.startswith(PROTOBUF):
        check_fields("ForwardBackwardRequest", body)
        message = parse_message("ForwardBackwardRequest", body)
        found = Numbered(model_id=message.model_id, seq_id=message.seq_id)
        num_bytes = sum(len(chunk.encoded_text.tokens) for datum in message.data for chunk in datum.model_input)
        return found, message.SerializeToString(deterministic=True), max(1, num_bytes // 4)
    found, tokens = read(Numbered, body), 0
    with contextlib.suppress(BadRequest):
        asked = read(ForwardBody, body)
        given = asked.forward_input or asked.forward_backward_input
        chunks = [chunk for datum in given.data for chunk in datum.model_input.chunks] if given else []
        tokens = sum(len(chunk.tokens or ()) for chunk in chunks)
    return found, _SAMPLING_NUMBER.sub(b"", body), max(1, tokens)


def forward_call(body: bytes, content_type: str, *, backward: bool) -> ForwardCall:
    """`backward`: what a request in JSON asks for; one in protobuf says it itself."""
    if content_type.startswith(PROTOBUF):
        message = parse_message("ForwardBackwardRequest", body)
        config = dict(message.loss_fn_config)
        for name, value in message.loss_fn_config_v2.items():
            if value.WhichOneof("value") == "text" or not math.isfinite(value.number):
                raise BadRequest(f"must be a number, not {value.text or value.number!r}.", f"loss_fn_config.{name}")
            config[name] = value.number
        if not message.data:
            raise BadRequest("is missing or empty.", "data")
        data = [_datum_of_message(datum, f"data[{index}]") for index, datum in enumerate(message.data)]
        return ForwardCall(data, LossCall(_loss(message.loss_fn), config), not message.forward_only)
    asked = read(ForwardBody, body)
    given = asked.forward_backward_input if backward else asked.forward_input
    if given is None:
        raise BadRequest("is missing.", "forward_backward_input" if backward else "forward_input")
    data = [_datum_of_body(datum, f"data[{index}]") for index, datum in enumerate(given.data)]
    return ForwardCall(data, LossCall(_loss(given.loss_fn), given.loss_fn_config or {}), backward)


def optim_call(body: Body) -> AdamParams:
    return AdamParams(**msgspec.structs.asdict(body.optimizer_params or body.optim_params or body.need("adam_params")))


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


def save_call(body: Body, *, is_sampler: bool) -> SaveCall:
    name, seq = body.path, body.sampling_session_seq_id
    if name is not None and not NAME.fullmatch(name):
        raise BadRequest(f"{name[:60]!r} must be a name of letters, digits, dots, dashes and underscores.", "path")
    if is_sampler and name is None:
        body.need("sampling_session_seq_id")
    kept = {key: str(value) for key, value in (body.metadata or {}).items()} or None
    return SaveCall(name, is_sampler, bool(body.overwrite), seq, kept, body.ttl_seconds)


def _loss(name: str) -> str:
    if name not in LOSSES:
        why = _REFUSED_LOSSES.get(name, f"there is no such loss. Losses: {', '.join(LOSSES)}.")
        raise BadRequest(f"{name!r}: {why}", "loss_fn")
    return name


def _datum_of_message(datum: Any, path: str) -> Datum:
    tokens = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise unsupported_chunk(str(kind), f"{path}.model_input")
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
    """Number of the prompt's last tokens whose log-probabilities are returned; None: all."""
    is_sparse: bool = False
    """Whether `target_prompt_logprobs` came as a sparse tensor, and goes back as one."""


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


@dataclass(frozen=True)
class RequestResult:
    """The result of a request, or its failure."""

    body: bytes
    message: str = ""
    """Type of the protobuf message that the body is; empty: it is JSON."""
    is_failure: bool = False


def plain(value: Mapping[str, Any]) -> RequestResult:
    return RequestResult(json.dumps(value).encode())


def failure(text: str, *, is_users: bool) -> RequestResult:
    """A failure that the SDK raises at once. `is_users`: whether the request is wrong, and not the server."""
    body = {"error": text, "category": "user" if is_users else "server"}
    return RequestResult(json.dumps(body).encode(), is_failure=True)


def forward_answer(output: ForwardOutput) -> RequestResult:
    """`logprobs` of every datum, and the sums as metrics that clients add up (`loss:sum`)."""
    pb = messages()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in output.metrics.items():
        message.metrics[f"{name}:sum"] = value
    values = [np.ascontiguousarray(array, "<f4") for array in output.logprobs]
    for trailing, alike in groupby(values, key=lambda value: value.shape[1:]):
        arrays = list(alike)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)])
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = ends.astype("<i8").tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
    return RequestResult(message.SerializeToString(deterministic=True), "ForwardBackwardOutput")


def sample_answer(output: SampleOutput, request: SampleRequest) -> RequestResult:
    pb = messages()
    message = pb.SampleResponse()
    for sample in output.samples:
        reason = pb.STOP_REASON_LENGTH if sample.finish_reason == "length" else pb.STOP_REASON_STOP
        sequence = message.sequences.add(
            stop_reason=reason, tokens=np.asarray(sample.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
        )  # fmt: skip
        if sample.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(sample.top, 0))
    num_hidden = max(1, len(request.call.prompt_ids) - (request.last_logprobs or len(request.call.prompt_ids)))
    if output.prompt_logprobs is not None:
        shown = np.array(output.prompt_logprobs, "<f4")
        shown[:num_hidden] = np.nan
        message.prompt_logprobs = shown.tobytes()
    if output.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(output.top_prompt, num_hidden))
    if output.target_logprobs is not None and request.call.target_prompt_ids is not None:
        values = np.asarray(output.target_logprobs, np.float32)
        is_there = request.call.target_prompt_ids != -1 if request.is_sparse else None
        message.target_prompt_logprobs.CopyFrom(tensor_message(values, is_there))
    return RequestResult(message.SerializeToString(deterministic=True), "SampleResponse")


def _top(top: TopTokens, num_hidden: int) -> Any:
    """The most likely tokens at each position; the first ones say nothing."""
    token_ids, logprobs = np.array(top.token_ids, "<i4"), np.array(top.logprobs, "<f4")
    token_ids[:num_hidden], logprobs[:num_hidden] = 0, _MASKED
    length, k = token_ids.shape
    return messages().TopkLogprobs(token_ids=token_ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)
