"""Calls for samples: the checks that engines share, and the log-probabilities of the prompt's own tokens.

Legend: P tokens of the prompt, V vocabulary, K tokens at a position, R positions computed at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.conf.errors import DataError, PromptRefused
from penstock.workers.protocols import SampleCall, SampledTokens, SampleOutput, TopTokens

if TYPE_CHECKING:
    import torch

ROWS = 512
"""Positions whose log-probabilities are computed at once: `ROWS * V` float32 are in memory."""


def response_room(prompt_ids: Sequence[int], max_model_len: int) -> int:
    """Tokens that a response may have. Raises `PromptRefused` where it may have none."""
    room = max_model_len - len(prompt_ids)
    if len(prompt_ids) == 0 or room < 1:
        raise PromptRefused(
            f"a prompt of {len(prompt_ids)} tokens leaves no room for a response in rollout.max_model_len="
            f"{max_model_len}, or is empty. Raise rollout.max_model_len or filter the data by length."
        )
    return room


def needs_prompt_scores(call: SampleCall) -> bool:
    """Return whether a call asks for log-probabilities of the prompt's own tokens."""
    asks_others = call.topk_prompt_logprobs > 0 or call.vocabulary_positions > 0
    return call.prompt_logprobs or asks_others or call.target_prompt_ids is not None


def check_call(call: SampleCall, vocabulary: int) -> None:
    """Raise `DataError` for a call that an engine would fail at."""
    if call.num_samples < 1 or call.sampling.seed is None:
        raise DataError(f"num_samples={call.num_samples}, seed={call.sampling.seed}: needs a sample and a seed.")
    if min(call.topk_prompt_logprobs, call.topk_logprobs) < 0:
        raise DataError(f"topk={call.topk_prompt_logprobs}, {call.topk_logprobs}: must be at least 0.")
    for name, ids in (("prompt_ids", call.prompt_ids), ("stop_ids", call.stop_ids)):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise DataError(f"{name}: has tokens outside of the model's vocabulary of {vocabulary}.")
    targets, positions = call.target_prompt_ids, call.vocabulary_positions
    if positions and (targets is not None or not 0 < positions < len(call.prompt_ids)):
        raise DataError(
            f"vocabulary_positions={positions}: must be 0, or less than the prompt's {len(call.prompt_ids)} tokens and "
            "without target_prompt_ids."
        )
    if targets is not None:
        if targets.ndim != 2 or len(targets) != len(call.prompt_ids) - 1:
            raise DataError(
                f"target_prompt_ids: of shape {list(targets.shape)}, must be [{len(call.prompt_ids) - 1}, K] for a "
                f"prompt of {len(call.prompt_ids)} tokens."
            )
        if targets.size and not -1 <= targets.min() <= targets.max() < vocabulary:
            raise DataError(f"target_prompt_ids: has tokens outside of the model's vocabulary of {vocabulary}.")


class PromptScores:
    """Log-probabilities of the tokens of a prompt, which an engine fills in where the call asks for them; see
    `SampleOutput`."""

    def __init__(self, call: SampleCall, vocabulary: int) -> None:
        self._call, self.target_ids = call, call.target_prompt_ids
        self.num_top = min(call.topk_prompt_logprobs, vocabulary)
        shape = (len(call.prompt_ids), self.num_top)
        self.logprobs = np.full(shape[0], np.nan, np.float32)
        self.top_ids, self.top_logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.targets = None if self.target_ids is None else np.zeros(self.target_ids.shape, np.float32)
        self.vocabulary: np.ndarray | None = None

    def fill(self, logits_PV: "torch.Tensor") -> None:
        """Compute all scores. `logits_PV`: at each token of the prompt, for the next one."""
        import torch

        num_tokens, ids = len(self.logprobs), self.target_ids
        next_P1 = torch.tensor([*self._call.prompt_ids[1:]], device=logits_PV.device)[:, None]
        for first in range(0, num_tokens - 1, ROWS):
            rows = slice(first, min(first + ROWS, num_tokens - 1))
            after = slice(rows.start + 1, rows.stop + 1)
            logprobs_RV = logits_PV[rows].float().log_softmax(-1)
            self.logprobs[after] = logprobs_RV.gather(-1, next_P1[rows])[:, 0].cpu().numpy()
            if self.num_top:
                best = logprobs_RV.topk(self.num_top, -1)
                self.top_ids[after], self.top_logprobs[after] = best.indices.cpu().numpy(), best.values.cpu().numpy()
            if ids is not None and self.targets is not None:
                ids_RK = torch.from_numpy(ids[rows].astype(np.int64)).to(logprobs_RV.device)
                values_RK = logprobs_RV.gather(-1, ids_RK.clamp_min(0))
                self.targets[rows] = values_RK.masked_fill(ids_RK < 0, 0.0).cpu().numpy()
        if positions := self._call.vocabulary_positions:
            self.vocabulary = logits_PV[-1 - positions : -1].float().log_softmax(-1).cpu().numpy()

    def output(self, samples: list[SampledTokens]) -> SampleOutput:
        """The answer to the call: these samples, and the scores that it asks for."""
        top = TopTokens(self.top_ids, self.top_logprobs) if self.num_top else None
        own = self.logprobs if self._call.prompt_logprobs else None
        return SampleOutput(samples, own, top, self.targets, self.vocabulary)
