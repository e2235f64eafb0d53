"""Decodes requests for samples: `SampleRequest` in JSON ─▶ `SampleRequest` here, with the call for the engines in it.

What no engine here does is refused by name.
"""

from dataclasses import dataclass

import numpy as np

from penstock.orchestrator.serve.wire.bodies import SampleBody, SamplingParams, Tensor, read
from penstock.orchestrator.serve.wire.messages import array_of_body
from penstock.workers.gateway.http.errors import BadRequest
from penstock.workers.protocols import Sampling
from penstock.workers.sample_calls import SampleCall


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
