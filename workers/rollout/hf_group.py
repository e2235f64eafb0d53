"""A group of responses to one prompt, as the hf engine samples it: what is asked for, and what has come of it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.workers.calls.sample_calls import SampledTokens, TopTokens
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.protocols import Sampling


@dataclass(frozen=True)
class Request:
    """What the responses of a group are sampled by."""

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
class Response:
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
