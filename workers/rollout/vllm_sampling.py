"""Conversion of requests for samples from adapters to vLLM's terms and back. Importing this module does not import
vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.conf.errors import DataError
from penstock.workers.calls.sample_calls import SampleCall, SampledTokens, TopTokens
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.prompt_scores import PromptScores
from penstock.workers.rollout.vllm_conversion import outputs_of, sampling_params

MOST_SCORES = 1 << 20
"""Most log-probabilities of a prompt, tokens times vocabulary, that are brought here from an engine that cannot choose
those that are asked for."""


@dataclass(frozen=True)
class SampleAsker:
    """One call, as vLLM is asked it."""

    call: SampleCall
    vocabulary: int
    chooses: bool
    """True if the engine can score tokens of a prompt that it is told (vLLM's second model runner, which needs
    Triton)."""
    detokenizer: Detokenizer = NO_TOKENIZER

    def samples(self, banned: Sequence[int], num_samples: int | None = None) -> Any:
        """vLLM's parameters for the samples. `banned`: tokens that are never sampled."""
        made = sampling_params(num_samples or self.call.num_samples, self.call.sampling, banned, self.detokenizer)
        made.stop_token_ids = sorted({*self.call.stop_ids, *made.stop_token_ids})
        made.logprobs = min(self.call.topk_logprobs, self.vocabulary)
        return made

    def scored(self, banned: Sequence[int]) -> Any:
        """vLLM's parameters for the scores of the prompt: with the sample, if it is the only one, otherwise with one
        token. Raises `DataError`."""
        call, ids = self.call, self.call.target_prompt_ids
        if call.num_samples > 1:
            call = replace(call, sampling=replace(call.sampling, max_tokens=1))
        made = replace(self, call=call).samples(banned, 1)
        made.skip_reading_prefix_cache = True
        if call.prompt_logprobs or call.topk_prompt_logprobs:
            made.prompt_logprobs = min(call.topk_prompt_logprobs, self.vocabulary)
        if ids is None or not ids.size:
            return made
        if self.chooses:
            made.prompt_logprob_token_ids = ids.astype(np.int32)
        elif len(call.prompt_ids) * self.vocabulary <= MOST_SCORES:
            made.prompt_logprobs = -1
        else:
            raise DataError(
                f"target_prompt_ids: vLLM without Triton, as on a CPU, scores no chosen tokens of a prompt, and has to "
                f"tell of its whole vocabulary: {len(call.prompt_ids)} tokens times {self.vocabulary} are more than "
                f"{MOST_SCORES}. Set rollout.engine=hf."
            )
        return made

    def scores_of(self, output: Any) -> PromptScores:
        """What vLLM says of the prompt. It has for each position the token itself, then the likeliest ones."""
        call, ids, flat = self.call, self.call.target_prompt_ids, output.prompt_logprobs
        num_tokens, num_top = len(call.prompt_ids), min(call.topk_prompt_logprobs, self.vocabulary)
        chosen = np.full(num_tokens, np.nan, np.float32)
        top_ids, top = np.zeros((num_tokens, num_top), np.int32), np.zeros((num_tokens, num_top), np.float32)
        targets = None if ids is None else np.zeros(ids.shape, np.float32)
        for position in range(1, num_tokens if flat is not None else 0):
            first, end = flat.start_indices[position], flat.end_indices[position]
            chosen[position] = flat.logprobs[first]
            top_ids[position] = flat.token_ids[first + 1 : first + 1 + num_top]
            top[position] = flat.logprobs[first + 1 : first + 1 + num_top]
            if ids is not None and targets is not None and not self.chooses:
                every = np.zeros(self.vocabulary, np.float32)
                every[flat.token_ids[first + 1 : end]] = flat.logprobs[first + 1 : end]
                targets[position - 1] = np.where(ids[position - 1] < 0, 0, every[ids[position - 1]])
        if ids is not None and ids.size and self.chooses:
            targets = np.where(ids < 0, np.float32(0), output.prompt_token_id_logprobs)
        return PromptScores(
            chosen if call.prompt_logprobs else None, TopTokens(top_ids, top) if num_top else None, targets
        )  # fmt: skip

    def sampled(self, output: Any) -> list[SampledTokens]:
        return [self.sampled_of(sample) for sample in outputs_of(output, self.call.num_samples)]

    def sampled_of(self, sample: Any) -> SampledTokens:
        """One sample of a request, with the likeliest tokens at each of its positions."""
        flat, length, num_top = sample.logprobs, len(sample.token_ids), min(self.call.topk_logprobs, self.vocabulary)
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        top = None
        if num_top:
            places = np.array(flat.start_indices)[:, None] + 1 + np.arange(num_top)
            ids, values = np.array(flat.token_ids, np.int32)[places], np.array(flat.logprobs, np.float32)[places]
            top = TopTokens(ids.reshape(length, num_top), values.reshape(length, num_top))
        return SampledTokens(list(sample.token_ids), logprobs, sample.finish_reason, top)
