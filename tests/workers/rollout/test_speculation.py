"""When drafts pay: a share of accepted tokens, from seconds of decode steps."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.rollout import RolloutConfig, SpeculationConfig
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.speculation import (
    LEAST_DRAFTED,
    NUM_TRIALS,
    DraftCounts,
    DraftTrial,
    break_even,
    speculative_config,
)

SECONDS = st.floats(1e-4, 1.0)


def test_steps_as_fast_with_drafts_as_without_pay_from_the_first_accepted_token() -> None:
    assert break_even(0.1, 0.1, 4) == 0


def test_a_step_twice_as_long_with_four_tokens_pays_from_a_quarter_accepted() -> None:
    assert break_even(0.1, 0.2, 4) == pytest.approx(0.25)


@given(plain_s=SECONDS, drafting_s=SECONDS, num=st.integers(1, 16), share=st.floats(0, 1))
def test_drafts_pay_where_a_sequences_tokens_take_less_time(
    plain_s: float, drafting_s: float, num: int, share: float
) -> None:
    gain = (1 + num * share) * plain_s / drafting_s
    if abs(gain - 1) > 1e-6:
        assert (share > break_even(plain_s, drafting_s, num)) == (gain > 1)


def test_acceptance_is_judged_by_enough_tokens_and_anew_each_time() -> None:
    counts = DraftCounts()
    counts.add(LEAST_DRAFTED - 1, 0)
    assert not counts.is_slower(0.5)
    counts.add(1, 0)
    assert counts.is_slower(0.5)
    assert not counts.is_slower(0.5)
    counts.add(LEAST_DRAFTED, LEAST_DRAFTED * 6 // 10)
    assert not counts.is_slower(0.5)
    counts.add(LEAST_DRAFTED, LEAST_DRAFTED * 4 // 10)
    assert counts.is_slower(0.5)
    assert (counts.drafted, counts.accepted) == (3 * LEAST_DRAFTED, LEAST_DRAFTED)


def test_vllm_drafts_nothing_for_more_sequences_than_asked_for() -> None:
    found = speculative_config(SpeculationConfig("ngram", 3, max_sequences=8), "", 64)
    assert found["num_speculative_tokens_per_batch_size"] == [(1, 8, 3), (9, 64, 0)]
    found = speculative_config(SpeculationConfig("draft", 3, max_sequences=64), "a-draft", 64)
    assert found == {"num_speculative_tokens": 3, "method": "draft_model", "model": "a-draft"}


class PlayedEngine:
    """An engine on a clock of its own. Each trial takes longer than the one before, and begins with a step that reads
    the prompt."""

    def __init__(self, trial: DraftTrial) -> None:
        self._trial, self._now = trial, 0.0
        self.starts: list[tuple[bool, list[tuple[int, int, int]]]] = []
        """Each start, with drafts or without, and the requests after it: tokens of the prompt, samples, their
        tokens."""

    async def start(self, spec: EngineSpec) -> None:
        self.starts.append((spec.config.speculation.is_on, []))

    async def repeat(self, prompt_ids: list[int], num_samples: int, num_tokens: int) -> None:
        drafts, requests = self.starts[-1]
        requests.append((len(prompt_ids), num_samples, num_tokens))
        self.step(100.0, len(prompt_ids))
        for _ in range(3):
            self.step(
                (2.0 if drafts else 1.0) * len(requests), 0, SimpleNamespace(num_draft_tokens=9, num_accepted_tokens=9)
            )

    def step(self, seconds: float, num_prompt_tokens: int = 0, drafts: SimpleNamespace | None = None) -> None:
        self._now += seconds
        self._trial.record(drafts, SimpleNamespace(num_prompt_tokens=num_prompt_tokens), self._now)


def test_a_trial_compares_the_fastest_decode_steps_of_both_engines() -> None:
    trial = DraftTrial()
    engine = PlayedEngine(trial)
    config = RolloutConfig(max_model_len=64, speculation=SpeculationConfig("ngram", 4, max_sequences=8))
    asyncio.run(trial.run(EngineSpec(config), engine.start, engine.repeat))
    plain, drafting = [(16, 8, 16)] * NUM_TRIALS, [(16, 8, 48)] * NUM_TRIALS
    assert engine.starts == [(False, plain), (True, drafting)]
    assert (trial.counts.drafted, trial.are_slower()) == (0, False)
    engine.step(1.0, 0, SimpleNamespace(num_draft_tokens=LEAST_DRAFTED, num_accepted_tokens=LEAST_DRAFTED // 5))
    assert trial.are_slower()
    assert trial.verdict() == "400 of 2,000 drafted tokens were accepted, and drafts pay from a share of 0.25"
