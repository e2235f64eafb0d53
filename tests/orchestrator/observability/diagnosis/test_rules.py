"""Runs that are made to be wrong in one way are told so, and sound ones nothing."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis import HINT, Finding, History, findings

CONFIG = DiagnosisConfig()
Change = Callable[[int], dict[str, Any]]


def sound(step: int) -> dict[str, Any]:
    """Metrics of an asynchronous run that learns."""
    return {
        "step": step, "reward/mean": 0.2 + step / 200, "reward/std": 0.4, "reward/max": 1.0,
        "response_length/clip_ratio": 0.02, "mismatch/logprob_abs_mean": 1e-3, "actor/skipped_nonfinite": 0.0,
        "actor/grad_norm": 0.5 + 0.1 * (step % 3), "actor/entropy": 2.0 - step / 60, "actor/kl": 0.01 * step,
        "dropped/stale": 0.0, "dropped/no_signal": 20.0 * step, "store/rows_trained": 64.0 * step,
        "timing_s/step": 4.0, "timing_s/rollout": 3.5, "timing_s/train": 3.0, "timing_s/evaluation": 0.5,
        "idle/train": 0.25, "idle/rollout": 0.1, "actor/padding_share": 0.3, "environment/turns": None,
        "timing_s/reward": 0.4, "timing_s/reference": 0.3, "rollout/num_engines": 2.0,
        "rollout/groups/Rollout-0": 20.0 * step, "rollout/groups/Rollout-1": 12.0 * step,
        "ranks/slowest": float(step % 2), "ranks/forward_s_slowest": 1.2, "ranks/forward_s_others": 1.0,
        "ranks/tokens_spread": 1.1,
    }  # fmt: skip


SLOW_RANK = {"ranks/slowest": 1.0, "ranks/forward_s_slowest": 2.5}


def told(
    change: Change, num_steps: int = 100, max_staleness: int = 1, config: DiagnosisConfig = CONFIG
) -> dict[str, Finding]:
    history = History(config.window)
    found: dict[str, Finding] = {}
    for step in range(1, num_steps + 1):
        history.add(sound(step) | change(step))
        found |= {one.rule: one for one in findings(history, config, max_staleness)}
    return found


def test_a_sound_run_is_told_nothing() -> None:
    assert told(lambda step: {}) == {}


@pytest.mark.parametrize(
    ("rule", "change", "words"),
    [
        (
            "no_spread",
            lambda step: {"reward/std": 0.0, "reward/mean": 0.0, "reward/max": 0.0},
            "the reward 0, so nothing",
        ),
        ("cut_off", lambda step: {"response_length/clip_ratio": 0.9}, "90% of the responses"),
        ("mismatch", lambda step: {"mismatch/logprob_abs_mean": 0.3}, "0.3 a token"),
        (
            "other_distribution",
            lambda step: {
                "environment/turns": 40.0,
                "environment/turns_greedy": 1.0,
                "environment/turns_narrowed": 0.5,
            },
            "of 400 turns some were not sampled from what the trainer computes at any temperature: 10 greedy, 5 narrow",
        ),
        ("mismatch", lambda step: {"mismatch/logprob_abs_mean": 1e-4 * step}, "grew from 0.0006"),
        ("mismatch", lambda step: {"lag/logprob_abs_mean@2": 0.5, "probe/engine_max": 0.2}, "0.2 a token"),
        ("gradients", lambda step: {"actor/skipped_nonfinite": float(step == 50)}, r"1 optimizer step\(s\)"),
        ("gradients", lambda step: {"actor/grad_norm": 1.0 if step < 50 else 1e4}, "norm of 1 to 1e"),
        ("entropy", lambda step: {"reward/mean": 0.2, "actor/entropy": 2.0 if step < 20 else 0.01}, "without a higher"),
        ("kl", lambda step: {"actor/kl": 50.0}, "50.0 nats"),
        ("dropped", lambda step: {"dropped/reward_error": 64.0 * step}, "50% .* reward_error 640"),
        ("filtered", lambda step: {"dropped/no_signal": 640.0 * step}, "91% of the samples"),
        ("lazy_engine", lambda step: {"rollout/groups/Rollout-1": 2.0 * step}, "Rollout-1 has sampled 20 .* 110 on"),
        ("slow_rank", lambda step: SLOW_RANK, "rank 1 takes 2.5 times"),
        ("padding", lambda step: {"actor/padding_share": 0.7}, "70% of what ranks compute"),
        ("idle", lambda step: {"idle/train": 0.8}, "ranks wait 80%"),
        ("idle", lambda step: {"idle/rollout": 0.8}, "engines wait 80%"),
        ("evaluation", lambda step: {"timing_s/evaluation": 9.0}, "225% of the time"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_else(rule: str, change: Change, words: str) -> None:
    found = told(change)
    assert list(found) == [rule]
    assert found[rule].advice
    assert re.search(words, found[rule].text), found[rule].text


def test_a_policy_of_several_is_told_by_its_name_and_silence_is_no_fault() -> None:
    def change(step: int) -> dict[str, Any]:
        found = {f"actor/{name}": None for name in ("entropy", "kl", "grad_norm", "padding_share")}
        for name, entropy in (("solver", 2.0), ("proposer", 2.0 if step < 20 else 0.01)):
            found |= {f"{name}/response_length/mean": 9.0, f"{name}/reward/mean": 0.2, f"{name}/entropy": entropy}
        return found | {"dropped/silent": 64.0 * step}

    (found,) = told(change).values()
    assert found.rule == "entropy/proposer"
    assert found.text.startswith("proposer: entropy fell from 2 to 0.01 nats")


EXACT = replace(CONFIG, mismatch=1e-4)


def looks(step: int, kind: str, **values: float) -> dict[str, Any]:
    """What probes say of engines 0 and 1, each at every other step."""
    name = f"Rollout-{step % 2}"
    found = {f"probe/{kind}/{name}": values.get(name.replace("-", ""), 2e-7)}
    return found | {f"probe/temperature/{name}": 1.0 + values.get("spread", 0.0) * (step % 4 - 1.5)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step: looks(step, "scores", Rollout1=0.004), "^Rollout-1 and the trainer .* 0.004 a token .2e-07 at"),
        (lambda step: looks(step, "scores", Rollout1=0.004), "from the first look on: another dtype"),
        (lambda step: looks(step, "scores", Rollout1=0.004 * (step > 3)), "agreed at first .0.: since then"),
        (lambda step: looks(step, "scores", Rollout0=0.004, Rollout1=0.006), "^Rollout-0, Rollout-1 .* 0.005 a token,"),
        (
            lambda step: looks(step, "scores", Rollout1=0.004) if step % 15 in (0, 1) else {},
            "^Rollout-1 and the trainer",
        ),
        (lambda step: looks(step, "samples", Rollout1=0.02), "^Rollout-1: samples .* 0.02 a token .*stale keys"),
        (
            lambda step: looks(step, "samples", Rollout1=0.02) | {"probe/doubled/Rollout-1": 1.0},
            "Rollout-1: .* written twice",
        ),
        (
            lambda step: (
                looks(step, "samples", Rollout1=0.02, spread=0.0001)
                | ({"probe/temperature/Rollout-1": 1.01 + 0.0001 * (step % 3)} if step % 2 else {})
            ),
            "^Rollout-1 samples as if at 1.01 times the temperature .* 0.02 a token .2e-07 at the other",
        ),
    ],
)
def test_an_engine_that_differs_is_named_with_the_cause(change: Change, words: str) -> None:
    quiet = {"mismatch/logprob_abs_mean": 1e-7}
    found = told(lambda step: quiet | change(step), config=EXACT)
    assert list(found) == ["mismatch"]
    assert re.search(words, found["mismatch"].text), found["mismatch"].text
    assert found["mismatch"].advice


def test_a_single_look_and_a_scattered_temperature_name_no_engine() -> None:
    for change in (
        lambda step: {"probe/scores/Rollout-1": 0.2} if step == 50 else {},
        lambda step: looks(step, "samples", spread=0.02),
        lambda step: {"probe/samples/Rollout-0": 0.01, "probe/scores/Rollout-0": 0.01},  # bfloat16
    ):
        assert told(change) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {"dropped/no_signal": 128.0 * step},  # two of three samples: DAPO's filter at work
        lambda step: {"rollout/groups/Rollout-1": 6.0 * step},  # every engine half of the average at least
        lambda step: {"rollout/groups/Rollout-1": 7.0, "rollout/num_engines": 1.0},  # it has left
        lambda step: {"rollout/groups/Rollout-0": 1.0 * step, "rollout/groups/Rollout-1": 0.0},  # too few to tell
        lambda step: {"rollout/groups/Rollout-1": 12.0 * (step - 60) if step > 60 else None},  # it joined later
        lambda step: SLOW_RANK | {"ranks/slowest": float(step % 2)},  # now this one, now that
        lambda step: SLOW_RANK | {"timing_s/step": 40.0, "timing_s/rollout": 30.0},  # nobody waits for it
        lambda step: {"actor/padding_share": 0.7, "timing_s/train": 1.0},
    ],
)
def test_what_only_looks_like_waste_is_not_told(change: Change) -> None:
    assert told(change) == {}


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({}, "Raise rollout.num_workers: 5.0 times as many would keep the ranks busy."),
        ({"environment/turns": 9.0}, "Raise environment.num_workers or rollout.num_workers: 5.0 times as many"),
        ({"idle/rollout": 0.9, "timing_s/rollout": 0.4, "timing_s/reward": 3.0}, "rewards are slow. Raise reward.num_"),
        ({"idle/rollout": 0.9, "timing_s/rollout": 0.4, "timing_s/reference": 3.0}, "the scorers are slow."),
        ({"idle/rollout": 0.9}, "raise max_staleness, so that more groups are under way"),
    ],
)
def test_ranks_that_wait_are_told_what_they_wait_for(more: dict[str, Any], advice: str) -> None:
    assert advice in told(lambda step: {"idle/train": 0.8} | more)["idle"].advice


def test_a_rank_that_is_slow_by_its_rows_is_told_that() -> None:
    assert "other" in told(lambda step: SLOW_RANK)["slow_rank"].advice
    assert "more tokens" in told(lambda step: SLOW_RANK | {"ranks/tokens_spread": 2.4})["slow_rank"].advice


def test_a_task_that_is_solved_is_told_as_that() -> None:
    found = told(lambda step: {"reward/mean": 1.0, "reward/std": 0.0} if step > 50 else {})
    assert "may be solved" in found["no_spread"].advice


def test_what_overlapping_would_hide_is_a_hint_where_they_take_turns() -> None:
    found = told(lambda step: {"timing_s/rollout": 2.0, "timing_s/train": 1.6}, max_staleness=0)["idle"]
    assert (found.level, found.advice) == (HINT, "max_staleness=1 would hide up to 40% of the step.")
    assert told(lambda step: {"timing_s/rollout": 3.5, "timing_s/train": 0.2}, max_staleness=0) == {}


def test_a_run_that_is_sure_of_what_it_has_learned_has_not_collapsed() -> None:
    assert "entropy" not in told(lambda step: {"actor/entropy": 2.0 if step < 20 else 0.001})
    without = {"reward/mean": None, "reward/std": None, "actor/entropy": 0.0}
    assert told(lambda step: without if step > 1 else {}) == {}  # supervised


def test_nothing_is_said_of_few_steps_or_of_numbers_that_are_not_there() -> None:
    bad: Change = lambda step: {"response_length/clip_ratio": 1.0}  # noqa: E731
    assert told(bad, num_steps=CONFIG.window - 1) == {}
    history = History(CONFIG.window)
    for step in range(50):
        history.add({"step": step, "reward/std": None})
    assert findings(history, CONFIG, 0) == []
    same = {"reward/std": 0.0}
    assert told(lambda step: {**same, "reward/mean": None, "reward/max": None}) == {}


KEYS = sorted(sound(1))
NUMBERS = st.one_of(st.none(), st.floats(), st.integers(-3, 3), st.just("text"))


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), NUMBERS), max_size=25), st.integers(0, 2))
def test_whatever_the_numbers_are_no_rule_fails(lines: list[dict[str, Any]], max_staleness: int) -> None:
    history = History(3)
    for line in lines:
        history.add(line)
        findings(history, DiagnosisConfig(window=3), max_staleness)
