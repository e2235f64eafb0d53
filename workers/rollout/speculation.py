"""Speculative decoding in vLLM: its arguments, what drafts cost and bring, and when an engine does better without them.

    start   decode steps of an engine without drafts, then of the one with them ─▶ the share that is to be accepted
    steps   vLLM's statistics ─▶ tokens drafted, and accepted
    load    fewer are accepted ─▶ the engine begins again without drafts, then loads

Every token is distributed as without drafts (2211.17192): vLLM's rejection sampler keeps a drafted token with its
probability under the model, else draws another from what is left of the distribution, and reports the model's
log-probability, after temperature and truncation, for both. All tokens of one decode step have the version that checked
them, also if they were drafted before new weights came. Pure: `engine_vllm.py` starts, samples and begins again.
"""

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.conf.rollout import DRAFT, RolloutConfig, SpeculationConfig
from penstock.workers.pictures.processor import Family
from penstock.workers.protocols import EngineSpec

WORKER_WITH_DRAFTS = "penstock.workers.rollout.vllm_drafts.WorkerWithDrafts"
NGRAM_TOKENS = (2, 4)
"""Fewest and most tokens that must be the same as before. Single ones recur by chance."""
LEAST_DRAFTED = 2_000
"""Drafted tokens by which acceptance is judged: its standard error is then 0.011 at most."""
NUM_TRIALS, TRIAL_STEPS = 4, 16
"""Number of trials, of which the fastest counts, as disturbed ones are slower, and decode steps of each."""
TRIAL_PROMPT = [0] * 16
"""Prompt of trials, and, repeated, their response: every n-gram draft is accepted."""
Start = Callable[[EngineSpec], Awaitable[None]]
"""Starts an engine, after the end of the one before."""
Repeat = Callable[[list[int], int, int], Awaitable[None]]
"""Samples responses that repeat a prompt's first token: the prompt, number of samples, tokens of each."""


def draft_arguments(spec: EngineSpec, family: Family | None, max_num_seqs: int) -> dict[str, Any]:
    """Further arguments of an engine with drafted tokens. Raises `ConfigError` for a vision model."""
    speculation = spec.config.speculation
    if family is not None:
        raise ConfigError(
            f"rollout.speculation.method={speculation.method}: vLLM cannot check drafts of a vision model, some "
            "of whose tokens are never sampled. Set it to none."
        )
    found: dict[str, Any] = {"speculative_config": speculative_config(speculation, spec.draft_path, max_num_seqs)}
    return found if spec.config.num_gpus_per_worker else found | {"worker_extension_cls": WORKER_WITH_DRAFTS}


def without_drafts(spec: EngineSpec) -> EngineSpec:
    """The same engine without drafted tokens."""
    return replace(spec, config=replace(spec.config, speculation=SpeculationConfig()))


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


class DraftTrial:
    """Trial of an engine's drafts, from its start until it begins again without them. Lifecycle: `run` once, which
    starts the engine; `record` after each step of vLLM; `are_slower` before each load. Without `run` nothing is
    drafted, and they never are."""

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self._least_share = 0.0
        """Share of drafted tokens that must be accepted for them to pay."""
        self._step_seconds: list[float] | None = None
        """Seconds of each decode step; None: they are not noted."""
        self._noted = 0.0
        """Time of the last step."""

    async def run(self, spec: EngineSpec, start: Start, repeat: Repeat) -> None:
        """Start an engine without drafts, then the one with them, to know what they cost."""
        seconds = []
        for one in (without_drafts(spec), spec):
            await start(one)
            seconds.append(await self._fastest(one.config, spec.config.speculation.max_sequences, repeat))
        plain_s, drafting_s = seconds
        self._least_share = break_even(plain_s, drafting_s, spec.config.speculation.num_tokens)

    async def _fastest(self, config: RolloutConfig, most: int, repeat: Repeat) -> float:
        """Seconds of a decode step of as many sequences as drafts are made for, in the fastest of a few trials."""
        own, max_len = config.speculation, config.max_model_len
        prompt_ids = TRIAL_PROMPT[: max_len // 2]
        length = min(TRIAL_STEPS * (1 + own.num_tokens * own.is_on), max_len - len(prompt_ids))
        means = []
        for _ in range(NUM_TRIALS):
            self._step_seconds = []
            await repeat(prompt_ids, min(most, config.max_concurrent_samples), length)
            means.append(statistics.mean(self._step_seconds))
            self._step_seconds, self.counts = None, DraftCounts()
        return min(means)

    def record(self, drafts: Any, iteration: Any, now: float) -> None:
        """Note one step. `drafts`, `iteration`: vLLM's `SpecDecodingStats` and `IterationStats`, or None; `now`:
        seconds."""
        if self._step_seconds is not None and iteration is not None and not iteration.num_prompt_tokens:
            self._step_seconds.append(now - self._noted)
        self._noted = now
        if drafts is not None:
            self.counts.add(drafts.num_draft_tokens, drafts.num_accepted_tokens)

    def are_slower(self) -> bool:
        """Return whether fewer are accepted than pay, as `DraftCounts.is_slower` says it."""
        return self.counts.is_slower(self._least_share)

    def verdict(self) -> str:
        """What was accepted, and from which share drafts pay."""
        return (
            f"{self.counts.accepted:,} of {self.counts.drafted:,} drafted tokens were accepted, and drafts pay from a "
            f"share of {self._least_share:.2f}"
        )
