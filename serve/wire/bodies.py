"""Requests in JSON, as types: a field of another type is refused by name, and one that no type has is skipped and not
built. What a request costs before it is accepted is bounded by its size.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.conf.errors import PenstockError
from penstock.workers.gateway.http.errors import BadRequest

PLAIN_BYTES = 2**20
"""Largest body of a request without data."""
MOST_RATIO = 100
"""Factor by which a body beyond `PLAIN_BYTES` may grow when it is unpacked: data of real sequences shrink to a tenth at
most."""
MOST_KEYS, MOST_VALUES, MOST_FIELDS = 2**16, 2**20, 2**17
"""Most names and values of a body in JSON, and fields of one in protobuf: who decodes them holds up everybody else. The
SDK's 1024 sequences have 30,000 names or fields."""
METADATA_BYTES = 2**14
MOST_SAMPLES = 1024
Kind = TypeVar("Kind", bound=Struct)
Number = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Likely = Annotated[int, Meta(ge=0, le=100)]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


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
    """A request with its number: whose it is. Null is as if a field were absent."""

    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: Number | None = None

    def need(self, name: str) -> Any:
        """A field that has to be there. Raises `BadRequest`."""
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


class Chunk(Struct, gc=False):
    type: str
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None


class ModelInput(Struct, gc=False):
    chunks: list[Chunk]

    def tokens(self, path: str) -> list[int]:
        """The tokens of what a model reads, which is text alone. Raises `BadRequest`."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text" or chunk.tokens is None:
                raise no_chunk(chunk.type, path)
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


def no_chunk(kind: str, path: str) -> BadRequest:
    return BadRequest(f"a chunk of {kind} is not read here: send text (encoded_text) alone.", path)
