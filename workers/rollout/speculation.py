"""Speculative decoding in vLLM: its arguments, what drafts cost and bring, and when an engine does better without them.

    start   a trial of a few decode steps ─▶ StepSeconds ─▶ break_even: the share of drafted tokens to be accepted
    steps   vLLM's statistics ─▶ tokens drafted, and accepted
    load    fewer are accepted ─▶ the engine begins again without drafts, then loads

Every token is distributed as without drafts (2211.17192): vLLM's rejection sampler keeps a drafted token with its
probability under the model, else draws another from what is left of the distribution, and reports the model's
log-probability, after temperature and truncation, for both. All tokens of one decode step have the version that checked
them, also if they were drafted before new weights came. Pure, but for vLLM's parameters.
"""

from dataclasses import dataclass
from typing import Any

from penstock.conf.rollout import DRAFT, SpeculationConfig

NGRAM_TOKENS = (2, 4)
"""Fewest and most tokens that must be the same as before. Single ones recur by chance."""
LEAST_DRAFTED = 2_000
"""Drafted tokens by which acceptance is judged: its standard error is then 0.011 at most."""
TRIAL_STEPS = 12
"""Decode steps of each trial."""
TRIAL_PROMPT = [0] * 16
"""Prompt of trials, and, repeated, their response: every n-gram draft is accepted."""


def speculation_arguments(config: SpeculationConfig, draft_path: str, max_num_seqs: int) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`. The number of drafted tokens falls to 1, then 0, above `max_sequences`; there is
    always room for so many sequences, which the trial needs."""
    most, max_num_seqs = config.max_sequences, max(max_num_seqs, config.max_sequences + 2)
    how: dict[str, Any] = {
        "num_speculative_tokens": config.num_tokens,
        "num_speculative_tokens_per_batch_size": [
            (1, most, config.num_tokens), (most + 1, most + 1, 1), (most + 2, max_num_seqs, 0),
        ],
    }  # fmt: skip
    if config.method == DRAFT:
        how |= {"method": "draft_model", "model": draft_path}
    else:
        least, longest = NGRAM_TOKENS
        how |= {"method": "ngram", "prompt_lookup_min": least, "prompt_lookup_max": longest}
    return {"max_num_seqs": max_num_seqs, "speculative_config": how}


def trial_sizes(config: SpeculationConfig) -> dict[int, int]:
    """Sequences to decode together, by the number of tokens that are then drafted for each."""
    return {0: config.max_sequences + 2, 1: config.max_sequences + 1, config.num_tokens: config.max_sequences}


@dataclass(frozen=True)
class StepSeconds:
    """Median seconds of a decode step, by the number of tokens drafted for each sequence."""

    none: float
    one: float
    all: float


def break_even(seconds: StepSeconds, num_tokens: int, *, by_model: bool) -> float:
    """Share of drafted tokens that must be accepted for drafts to save time.

    A step with k drafted tokens takes C_k, and an accepted one saves a sequence a step without drafts, of P: drafts pay
    where k · share · P > C_k - P. A draft model also reads the tokens of steps for which it drafts nothing, so that
    C_0 = P + D, with D for one pass of it. C_1 = P + D + V, with V to check a token, and C_k = P + k (D + V).
    """
    plain = seconds.none
    if by_model:
        check = seconds.one - seconds.none
        plain -= min(max(0.0, (seconds.all - seconds.one) / (num_tokens - 1) - check), seconds.none / 2)
    return (seconds.all / plain - 1) / num_tokens


@dataclass
class DraftCounts:
    """Counts of drafted tokens. Lifecycle: `add` each step; `is_slower` when the engine could do without drafts."""

    drafted: int = 0
    accepted: int = 0
    _judged: tuple[int, int] = (0, 0)
    """Both counts when they were judged last."""

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    def is_slower(self, least_share: float) -> bool:
        """Return whether a smaller share than this was accepted since the last judgement, which waits for
        `LEAST_DRAFTED` tokens."""
        drafted, accepted = self.drafted - self._judged[0], self.accepted - self._judged[1]
        if drafted < LEAST_DRAFTED:
            return False
        self._judged = self.drafted, self.accepted
        return accepted < least_share * drafted
