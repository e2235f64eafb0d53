"""Speculative decoding in vLLM: its arguments, what drafts cost and bring, and when an engine does better without them.

    start   decode steps of an engine without drafts, then of the one with them ─▶ the share that is to be accepted
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
NUM_TRIALS, TRIAL_STEPS = 4, 16
"""Number of trials, of which the fastest counts, as disturbed ones are slower, and decode steps of each."""
TRIAL_PROMPT = [0] * 16
"""Prompt of trials, and, repeated, their response: every n-gram draft is accepted."""


def speculative_config(config: SpeculationConfig, draft_path: str, max_num_seqs: int) -> dict[str, Any]:
    """vLLM's `speculative_config`. With more than `max_sequences` it drafts nothing."""
    found: dict[str, Any] = {"num_speculative_tokens": config.num_tokens}
    if config.method == DRAFT:
        found |= {"method": "draft_model", "model": draft_path}
    else:
        least, longest = NGRAM_TOKENS
        found |= {"method": "ngram", "prompt_lookup_min": least, "prompt_lookup_max": longest}
    if (most := config.max_sequences) < max_num_seqs:
        sizes = [(1, most, config.num_tokens), (most + 1, max_num_seqs, 0)]
        found["num_speculative_tokens_per_batch_size"] = sizes
    return found


def break_even(plain_s: float, drafting_s: float, num_tokens: int) -> float:
    """Share of drafted tokens that must be accepted for drafts to save time. `plain_s`, `drafting_s`: seconds of a
    decode step of equally many sequences without drafts, and with so many tokens drafted for each. Each one that is
    accepted saves its sequence a step without drafts."""
    return (drafting_s / plain_s - 1) / num_tokens


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
