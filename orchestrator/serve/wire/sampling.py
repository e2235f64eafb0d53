"""Decodes requests for samples: `SampleRequest` in JSON ─▶ `SampleRequest` here, with the call for the engines in it.

What no engine here does is refused by name.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.orchestrator.serve.backend import SampleCall
from penstock.orchestrator.serve.wire.messages import array_of_fields
from penstock.orchestrator.serve.wire.training import text_tokens
from penstock.workers.gateway.http.fields import Fields
from penstock.workers.protocols import Sampling

MOST_SAMPLES = 1024
MOST_LIKELY = 100
_OPTIONS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


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


def sample_request(fields: Fields, max_length: int, default_seed: int) -> SampleRequest:
    """`max_length`: tokens of the longest sequence. `default_seed`: for a request that has none."""
    prompt = text_tokens(fields.need_object("prompt"))
    if not prompt:
        raise fields.wrong("prompt", "has no token.")
    fields.refuse("prompt_alt_tokens_k", "draws at prompt tokens are not done here: leave it out.", 0)
    fields.refuse("record_stability_info", "stable_reinforce is not done here: leave it out.", False)
    num_samples = fields.whole("num_samples", 1) or 1
    if num_samples > MOST_SAMPLES:
        raise fields.wrong("num_samples", f"must be at most {MOST_SAMPLES}, not {num_samples}.")
    sampling, stop_ids = _sampling(fields.need_object("sampling_params"), max_length - len(prompt), default_seed)
    targets = fields.object("target_prompt_logprobs")
    last = fields.whole("prompt_logprobs_last_n", 1)
    if last is not None and not fields.flag("prompt_logprobs"):
        raise fields.wrong("prompt_logprobs_last_n", "needs prompt_logprobs.")
    call = SampleCall(
        prompt, num_samples, sampling, stop_ids, fields.flag("prompt_logprobs"),
        _likely(fields, "topk_prompt_logprobs"), _targets(targets, len(prompt)),
        _likely(fields, "topk_sample_logprobs"),
    )  # fmt: skip
    return SampleRequest(call, last, targets is not None and "sparse_crow_indices" in targets)


def _sampling(fields: Fields, room: int, default_seed: int) -> tuple[Sampling, tuple[int, ...]]:
    unknown = set(fields.value) - set(_OPTIONS)
    if unknown:
        raise fields.wrong(min(unknown), f"is not done here: sampling parameters are {', '.join(_OPTIONS)}.")
    stops = fields.raw("stop")
    stop_ids: tuple[int, ...] = ()
    if isinstance(stops, list) and stops and all(type(stop) is int for stop in stops):
        stop_ids, stops = tuple(stops), []
    texts = fields.texts("stop") if stops else []
    seed, top_k, temperature = fields.whole("seed", 0), fields.whole("top_k", -1), fields.number("temperature", 0)
    top_p = fields.number("top_p", 0, 1)
    sampling = Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, top_k or 0),
        max_tokens=fields.whole("max_tokens", 1) or max(1, room),
        stop=tuple(texts or ()),
        seed=default_seed if seed is None else seed % 2**31,
    )
    return replace(sampling, max_tokens=min(sampling.max_tokens, max(1, room))), stop_ids


def _likely(fields: Fields, name: str) -> int:
    number = fields.whole(name, 0) or 0
    if number > MOST_LIKELY:
        raise fields.wrong(name, f"must be at most {MOST_LIKELY}, not {number}.")
    return number


def _targets(fields: Fields | None, num_prompt: int) -> np.ndarray | None:
    if fields is None:
        return None
    found = array_of_fields(fields, absent=-1)
    if found.dtype.kind != "i" or found.ndim != 2 or len(found) != num_prompt - 1:
        raise fields.wrong("shape", f"must be int64 of shape [{num_prompt - 1}, K], not {found.dtype} {found.shape}.")
    return found
