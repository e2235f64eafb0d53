"""A machine's cores are shared: what is predicted of a split of them, from the records of another, and by hand."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conf.run import RunConfig
from penstock.planner.processors import (
    NOTHING,
    Cores,
    ProcessorCosts,
    ProcessorDurations,
    SampledGroup,
    fit_costs,
    fit_decoding,
    gain,
)
from penstock.planner.simulation.simulation import Simulation
from tests.amounts import amount
from tests.planner.simulation.played import TEN, config_of, played

COSTS = ProcessorCosts(
    decode_s=0.1, sequence_s=0.01, group_s=0.5, token_s=0.03, update_s=1.0, published_s=0.4, paused_s=0.2, scored_s=0.3,
    between_s=0.1, engine_gains={1: 1.0}, rank_gains={1: 1.0, 2: 1.6},
)  # fmt: skip
"""Of a group of two samples of ten tokens 0.5 + 10 x 0.12 = 1.7 s, of an update 1 s and 0.45 s a row."""
ALONE = {"rollout.num_workers": 1, "trainer.num_ranks": 1, "rollout.num_threads": 1, "trainer.num_threads": 1,
         "rollout.max_concurrent_samples": 2}  # fmt: skip


def split(config: RunConfig, num_cores: int, costs: ProcessorCosts = COSTS) -> ProcessorDurations:
    return ProcessorDurations(costs, config, num_cores, TEN.prompt_tokens)


def step_s(num_cores: int, others: float = 0.0, **keys: Any) -> float:
    config = config_of(**{**ALONE, **keys})
    durations = split(config, num_cores)
    return played(Simulation(config, durations, TEN, cores=replace(durations.cores(), others=others))).step_s


def test_a_step_whose_members_take_turns_is_the_sum_of_its_parts() -> None:
    """Four groups of 1.7 s, scored 0.3 s after the last, 1 + 8 x 0.45 s of update, 0.7 s until the next. Two threads
    of a rank are 1.6 times as fast. Two ranks have half of the tokens each, and exchange for as long as 12
    publications."""
    assert step_s(2) == pytest.approx(4 * 1.7 + 0.3 + 4.6 + 0.7)
    assert step_s(2, **{"trainer.num_threads": 2}) == pytest.approx(4 * 1.7 + 0.3 + 4.6 / 1.6 + 0.7)
    assert step_s(2, **{"trainer.num_ranks": 2}) == pytest.approx(4 * 1.7 + 0.3 + 1.0 + 1.8 + 12 * 0.4 + 0.7)


def test_three_engines_on_two_cores_take_half_as_long_again() -> None:
    """Two of three have one group each, one has two: 1.7 s of three, then 1.7 s of one alone. A core more, and nobody
    is in the way. Loads, by three at once, are slower as well."""
    engines = {"rollout.num_workers": 3}
    rest = 0.3 + 4.6 + 0.5
    assert step_s(3, **engines) == pytest.approx(1.7 + 1.7 + 0.2 + rest)
    assert step_s(2, **engines) == pytest.approx(1.5 * 1.7 + 1.7 + 1.5 * 0.2 + rest)


def test_what_store_and_driver_take_counts_where_cores_are_all_asked_for() -> None:
    assert step_s(2, others=0.1) == step_s(2)
    crowded = {"rollout.num_workers": 2, "trainer.num_ranks": 2}
    assert step_s(2, others=0.1, **crowded) == pytest.approx(1.1 * (2 * 1.7 + 2.8 + 4.8 + 0.2) + 0.3 + 0.5)


@settings(max_examples=amount(25))
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), st.floats(0.0, 0.3)
)
def test_more_cores_never_make_a_step_longer(
    engines: int, ranks: int, off: int, engine_threads: int, rank_threads: int, others: float
) -> None:
    keys = {
        "rollout.num_workers": engines, "trainer.num_ranks": ranks, "max_staleness": off,
        "rollout.num_threads": engine_threads, "trainer.num_threads": rank_threads,
    }  # fmt: skip
    seconds = [step_s(cores, others, **keys) for cores in (1, 2, 3, 8)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(seconds))


@given(st.integers(1, 8), st.integers(1, 8))
def test_a_member_alone_is_not_slowed_down_by_its_own_threads(threads: int, more: int) -> None:
    config = config_of(**{**ALONE, "rollout.num_threads": threads, "trainer.num_threads": threads})
    cores = replace(split(config, threads + more - 1).cores(), others=0.0)
    assert cores.pace(1, 0) == cores.pace(0, 1) == 1


def test_threads_that_nobody_tried_gain_as_much_as_the_most_that_were() -> None:
    assert [gain({1: 1.0, 2: 1.6}, threads) for threads in (1, 2, 7)] == [1.0, 1.6, 1.6]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8))
def test_one_more_member_never_makes_the_others_faster(engines: int, ranks: int, cores: int) -> None:
    shared = Cores(cores, 1.0, 1.7)
    assert shared.pace(engines + 1, ranks) >= shared.pace(engines, ranks)
    assert shared.pace(engines, ranks + 1) >= shared.pace(engines, ranks)


# What a run has recorded.


def recorded(
    config: RunConfig, num_steps: int = 5
) -> tuple[list[dict[str, Any]], dict[int, list[tuple[int, int, int]]]]:
    """Lines of `spans.jsonl` of a synchronous run with one engine and one rank, and what each step has trained."""
    durations, dice = split(config, 2), random.Random(0)
    lines, rows, at, number = list[dict[str, Any]](), dict[int, list[tuple[int, int, int]]](), 0.0, 0
    for step in range(3, 3 + num_steps):
        lanes: dict[str, Any] = {"Rollout-0": [], "Trainer-policy-0": []}
        start, rows[step] = at, []

        def add(lane: str, name: str, begun: float, seconds: float, **details: Any) -> float:
            end = begun + seconds
            lanes[lane].append([name, round(1000 * (begun - start)), round(1000 * (end - start)), details])  # noqa: B023
            return end

        for _ in range(4):
            lengths = [dice.randint(1, 40) for _ in range(2)]
            there = [sum(length > done for length in lengths) for done in range(max(lengths))]
            seconds = 0.5 + sum(durations.decode_s(count, 0) for count in there)
            at = add("Rollout-0", "rollout", at, seconds, group=number, groups=1)
            rows[step] += [(number, 5, length) for length in lengths]
            number += 1
        tokens = sum(5 + length for _, _, length in rows[step])
        passes = durations.update_s([[tokens]]) - durations.update_s([])
        at = add("Trainer-policy-0", "update", at + 0.3, durations.update_s([[tokens]]), forward=passes, backward=0.0)
        at = add("Trainer-policy-0", "publish", at + 0.04, 0.4)
        at = add("Rollout-0", "load weights", at, 0.2) + 0.06
        lines.append({"step": step, "start": start, "lanes": lanes})
    return lines, rows


@pytest.mark.parametrize("threads", [1, 2])
def test_costs_are_found_again_in_the_records_of_a_run(threads: int) -> None:
    config = config_of(**{**ALONE, "trainer.num_threads": threads})
    lines, rows = recorded(config)
    unknown = replace(NOTHING, engine_gains=COSTS.engine_gains, rank_gains=COSTS.rank_gains)
    found = fit_costs(lines, rows, split(config, 2, unknown))
    for name, seconds in vars(COSTS).items():
        assert getattr(found, name) == pytest.approx(seconds, abs=2e-3)


def test_a_run_without_its_samples_says_too_little() -> None:
    config = config_of(**ALONE)
    lines, _ = recorded(config)
    with pytest.raises(ValueError, match="too few steps"):
        fit_costs(lines, {}, split(config, 2))


def test_groups_that_are_decoded_at_once_share_their_steps() -> None:
    """Five batches of six groups of four, each begun at once: a step of n sequences takes 0.1 s and 0.01 s for each."""
    dice, groups, at = random.Random(0), list[SampledGroup](), 0.0
    for _ in range(5):
        batch = [tuple(dice.randint(5, 60) for _ in range(4)) for _ in range(6)]
        ends = [at]
        for step in range(60):
            ends.append(ends[-1] + 0.1 + 0.01 * sum(length > step for lengths in batch for length in lengths))
        groups += [SampledGroup(at, ends[max(lengths)], lengths) for lengths in batch]
        at = ends[-1]
    decode_s, sequence_s, group_s = fit_decoding([groups], one_at_a_time=False)
    for count in (4, 12, 24):
        assert decode_s + count * sequence_s == pytest.approx(0.1 + 0.01 * count, rel=0.01)
    assert group_s < 0.02
