"""What an evaluation costs the steps beside it, and how long its result takes, by a model of the engines' capacity."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.durations import ConstantDurations, SyncSeconds
from penstock.planner.lengths import Lengths
from penstock.planner.simulation.engines import FleetChanges
from penstock.planner.simulation.simulated_evaluation import (
    BESIDE,
    BLOCKING,
    OWN,
    EvaluationPlan,
    mean_steps,
    seconds_alone,
)
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation, SimulationResult
from tests.amounts import amount
from tests.planner.simulation.played import EASY, TEN, config_of, play, played

GPU = ConstantDurations(
    prefill_tokens_per_s=40_000, decode={1: 0.010, 64: 0.012, 256: 0.030}, update_tokens_per_s=60_000,
    synced=SyncSeconds(0.3, 0.1, 0.1),
)  # fmt: skip
ROOM = 64
"""Most sequences that an engine decodes at a time."""
SAMPLES = SimulatedSamples(partial(Lengths.lognormal(70, 128, 0.4).of, seed=1), prompt_tokens=20)
FILL = 6
"""Steps at the start that are not compared: they fill the pipeline."""


def evaluating(plan: EvaluationPlan | None, num_engines: int, max_staleness: int, durations: ConstantDurations = GPU):
    keys = {
        "rollout.num_workers": num_engines, "rollout.max_concurrent_samples": ROOM, "algorithm.group_size": 8,
        "trainer.groups_per_step": 32, "trainer.max_steps": 80,
    }  # fmt: skip
    config = config_of(max_staleness=max_staleness, **keys)
    return Simulation(config, durations, SAMPLES, evaluation=plan).run()


def steps_of(found: SimulationResult) -> tuple[float, float]:
    """Mean seconds of the steps beside which something is evaluated, and of the others."""
    beside, others = mean_steps(found.steps_s, found.evaluations, FILL)
    assert beside is not None
    assert others is not None
    return beside, others


def largest_wait(found: SimulationResult, alone_s: float) -> float:
    """The longest time until a result, as a multiple of what its engines need alone."""
    assert [one.step for one in found.evaluations] == [20, 40, 60, 80]
    return max((one.ended - one.due) / alone_s for one in found.evaluations)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("num_engines", [1, 4])
def test_own_engines_leave_steps_as_they_are(num_engines: int, max_staleness: int) -> None:
    plan = EvaluationPlan(20, 128, 8, OWN)
    found = evaluating(plan, num_engines, max_staleness)
    beside, others = steps_of(found)
    assert beside <= 1.05 * others
    assert largest_wait(found, seconds_alone(plan, 1, GPU, SAMPLES, ROOM)) <= 1.15


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize(("num_engines", "num_lent"), [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_lent_engines_cost_steps_no_more_than_their_share(num_engines: int, num_lent: int, max_staleness: int) -> None:
    plan = EvaluationPlan(20, 64 * num_lent, 8, BESIDE, num_lent)
    found = evaluating(plan, num_engines, max_staleness)
    beside, others = steps_of(found)
    assert others < beside <= 1.15 * others * num_engines / (num_engines - num_lent)
    assert largest_wait(found, seconds_alone(plan, num_lent, GPU, SAMPLES, ROOM)) <= 1.15


@pytest.mark.parametrize("num_problems", [64, 256, 512])
def test_as_few_engines_are_lent_as_are_done_before_the_next_evaluation(num_problems: int) -> None:
    plan = EvaluationPlan(20, num_problems, 8, BESIDE)
    found = evaluating(plan, 8, 2)
    until_next_s = [after.due - one.due for one, after in pairwise(found.evaluations)]
    taken_s = [one.ended - one.due for one in found.evaluations[:-1]]
    assert all(took < until for took, until in zip(taken_s, until_next_s, strict=True))
    fewest = min(n for n in range(1, 8) if seconds_alone(plan, n, GPU, SAMPLES, ROOM) < 0.9 * min(until_next_s))
    beside, others = steps_of(found)
    assert beside <= 1.15 * others * 8 / (8 - fewest)


def test_an_evaluation_that_blocks_would_be_seen() -> None:
    beside, others = steps_of(evaluating(EvaluationPlan(20, 128, 8, BLOCKING), 4, 2))
    assert beside > 5 * others


def test_lent_engines_cost_nothing_where_ranks_decide() -> None:
    beside, others = steps_of(
        evaluating(EvaluationPlan(20, 128, 8, BESIDE, 1), 4, 2, replace(GPU, update_tokens_per_s=4_000))
    )
    assert beside <= 1.05 * others


def test_an_evaluation_that_blocks_costs_its_step_all_of_its_time() -> None:
    """Two engines answer two problems each: two prompts are read, two sequences decode in ten steps."""
    config, plan = config_of(), EvaluationPlan(2, 4)
    alone_s = 2 * 0.5 + 10 * 0.12
    assert seconds_alone(plan, 2, EASY, TEN, ROOM) == pytest.approx(alone_s)
    before, found = play(config), play(config, evaluation=plan)
    costs = [after - one for after, one in zip(found.steps_s, before.steps_s, strict=True)]
    assert costs == pytest.approx([0.0, alone_s, alone_s])
    assert [(one.step, one.ended - one.due) for one in found.evaluations] == [
        (2, pytest.approx(alone_s)),
        (3, pytest.approx(alone_s)),
    ]


def test_samples_follow_the_greedy_responses() -> None:
    """One engine: four prompts, four sequences; then four times two prompts of three sequences."""
    greedy_s, each_s = 4 * 0.5 + 10 * 0.14, 0.5 + 10 * 0.13
    assert seconds_alone(EvaluationPlan(1, 4, 3), 1, EASY, TEN, 4) == pytest.approx(greedy_s + 4 * each_s)


@settings(max_examples=amount(40), deadline=None)
@given(
    seed=st.integers(0, 1000), bound=st.integers(0, 3), engines=st.integers(1, 4), every=st.integers(1, 4),
    problems=st.integers(1, 40), samples=st.integers(0, 3), way=st.sampled_from((BLOCKING, BESIDE, OWN)),
    share=st.sampled_from(("auto", 1, 2)), faults=st.booleans(),
)  # fmt: skip
def test_every_group_is_trained_once_within_the_bound_beside_an_evaluation(
    seed: int,
    bound: int,
    engines: int,
    every: int,
    problems: int,
    samples: int,
    way: str,
    share: int | str,
    faults: bool,
) -> None:
    config = config_of(
        max_staleness=bound,
        seed=seed,
        **{"rollout.num_workers": engines, "trainer.max_steps": 6, "rollout.max_concurrent_samples": 6},
    )
    changes = FleetChanges(40.0, 7.0) if faults else FleetChanges()
    lengths = SimulatedSamples(partial(Lengths.lognormal(10, 40, 0.5).of, seed=seed), prompt_tokens=5)
    simulation = Simulation(
        config, EASY, lengths, changes, evaluation=EvaluationPlan(every, problems, samples, way, share)
    )
    found = played(simulation)
    due = [step for step in range(1, 7) if step % every == 0 or step == 6]
    told = [one.step for one in found.evaluations]
    assert told == due if not faults else set(told) <= set(due)
    assert simulation.engines is not None
    assert not simulation.engines.lent
