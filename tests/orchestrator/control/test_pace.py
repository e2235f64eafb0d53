"""The choice between working at the same time and taking turns."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.threads import SharedNode, Threads, Trial
from penstock.orchestrator.control.turns import LEAST_REST, MOST_LEFT_OUT, PAIRS, TRIED, CpuTurns, TurnChoice
from penstock.store.ledger.admission import Credits
from tests.fakes.actors import FakeHandle

SETTLES = 3
BLOCK = SETTLES + TRIED
FIRST = 2 * SETTLES + TRIED
"""Number of steps of the first block of a run."""
CLEAR_TRIAL = FIRST + BLOCK + BLOCK + TRIED
"""Number of steps of a trial of two pairs of blocks, which is its shortest."""
LONGEST = CLEAR_TRIAL + (PAIRS - 2) * (BLOCK + TRIED)
RECORDED = (
    3.81, 2.71, 2.48, 2.67, 2.78, 3.62, 4.66, 4.25, 4.25, 4.17, 4.13, 5.77, 4.23, 2.78, 2.37, 3.18, 2.9, 3.41, 4.06,
    4.2, 4.0, 6.3, 5.73, 5.33, 4.33, 4.44, 6.95,
)  # fmt: skip
"""Seconds of steps that were alike, on two cores with a load of nine."""


@dataclass(frozen=True)
class Machine:
    """Seconds of steps on a machine that others use, too: 1 at the same time, `turns` in turns."""

    turns: float
    noise: float = 0.03
    memory: float = 0.0
    """Correlation of the noise of a step with that of the step before."""
    drift: float = 0.0
    outliers: float = 0.0
    """Share of steps that take 3x as long."""

    def seconds(self, seed: int) -> Iterator[Callable[[bool], float]]:
        draws, noise = random.Random(seed), 0.0
        for step in itertools.count():
            noise = self.memory * noise + math.sqrt(1 - self.memory**2) * draws.gauss(0, self.noise)
            factor = math.exp(noise + self.drift * step) * (3 if draws.random() < self.outliers else 1)
            yield lambda way, factor=factor: factor * (self.turns if way else 1.0)


def ways(machine: Machine, steps: int, seed: int = 0) -> list[bool]:
    """Whether each step is made in turns."""
    choice, found = TurnChoice(SETTLES), []
    for seconds in itertools.islice(machine.seconds(seed), steps):
        found.append(choice.takes_turns)
        choice.note(seconds(choice.takes_turns))
    return found


def chosen(machine: Machine, seed: int) -> tuple[int, bool]:
    """Number of steps of the first trial, and whether it has chosen turns."""
    choice = TurnChoice(SETTLES)
    for step, seconds in enumerate(machine.seconds(seed), 1):
        if choice.note(seconds(choice.takes_turns)) is not None:
            return step, choice.takes_turns
    raise AssertionError("never")


@pytest.mark.parametrize(("turns", "expected"), [(1.5, False), (0.6, True), (0.85, True)])
def test_two_pairs_of_blocks_suffice_where_one_way_is_clearly_faster(turns: float, expected: bool) -> None:
    found = ways(Machine(turns, noise=0.0), CLEAR_TRIAL + LEAST_REST)
    assert found[:FIRST] == [False] * FIRST
    assert found[FIRST : FIRST + BLOCK + TRIED] == [True] * (BLOCK + TRIED)
    assert found[FIRST + BLOCK + TRIED : CLEAR_TRIAL] == [False] * BLOCK
    assert found[CLEAR_TRIAL:] == [expected] * LEAST_REST


def test_pairs_alternate_in_their_order_and_the_last_one_decides() -> None:
    found = ways(Machine(0.98, noise=0.0), LONGEST + LEAST_REST)
    runs = [(way, len([*steps])) for way, steps in itertools.groupby(found)]
    turned = [(way % 2 == 1, BLOCK + TRIED) for way in range(1, PAIRS)]
    assert runs == [(False, FIRST), *turned, (True, BLOCK + LEAST_REST)]


@pytest.mark.parametrize(("turns", "most_wrong"), [(0.7, 0), (0.85, 4), (1 / 0.85, 4), (1 / 0.7, 1)])
def test_steps_recorded_on_a_busy_machine_seldom_decide(turns: float, most_wrong: int) -> None:
    wrong = 0
    for offset in range(len(RECORDED)):
        choice = TurnChoice(SETTLES)
        for seconds in itertools.islice(itertools.cycle(RECORDED), offset, None):
            if choice.note(seconds * (turns if choice.takes_turns else 1.0)) is not None:
                break
        wrong += choice.takes_turns != (turns < 1)
    assert wrong <= most_wrong


@pytest.mark.parametrize("turns", [0.85, 1 / 0.85])
@pytest.mark.parametrize(
    ("machine", "most_wrong"),
    [
        (Machine(1.0), 0),
        (Machine(1.0, outliers=0.03), 0),
        (Machine(1.0, drift=0.02), 0),
        (Machine(1.0, drift=-0.02), 0),
        (Machine(1.0, noise=0.1), 1),
        (Machine(1.0, noise=0.1, memory=0.7, outliers=0.03), 5),
    ],
)
def test_noise_outliers_and_drift_seldom_decide(machine: Machine, most_wrong: int, turns: float) -> None:
    found = [chosen(replace(machine, turns=turns), seed) for seed in range(100)]
    assert sum(way != (turns < 1) for _, way in found) <= most_wrong
    assert max(steps for steps, _ in found) <= LONGEST


@pytest.mark.parametrize("turns", [0.6, 0.85, 0.97, 1.0, 1.03, 1.2, 1.6])
@pytest.mark.parametrize(("noise", "memory", "most"), [(0.05, 0.0, 1.03), (0.2, 0.7, 1.05)])
def test_trials_and_wrong_choices_cost_little(turns: float, noise: float, memory: float, most: float) -> None:
    """Of 600 steps, the first trial included, against the faster way from the beginning."""
    machine, best = Machine(turns, noise, memory), min(1.0, turns)
    took = [turns if way else 1.0 for seed in range(10) for way in ways(machine, 600, seed)]
    assert sum(took) / len(took) <= most * best


def test_longer_responses_bring_a_trial_sooner_than_the_next_one_is_due() -> None:
    """What was slower is faster then: 1 s at the same time and 1.15 in turns become 2 and 1.2."""

    def changed(grown: tuple[float, float]) -> int:
        """Number of steps after the first trial until engines and ranks take turns again, in a trial or by choice."""
        choice = TurnChoice(SETTLES)
        for step in itertools.count(-CLEAR_TRIAL):
            choice.note((grown if step >= 2 * LEAST_REST else (1.0, 1.15))[choice.takes_turns])
            if step > 0 and choice.takes_turns:
                return step
        raise AssertionError("never")

    due = changed((1.0, 1.15))
    assert due > 3 * LEAST_REST
    assert changed((2.0, 1.2)) < 2 * LEAST_REST + 3 * TRIED
    assert changed((1.1, 1.2)) == due


def test_what_was_equal_is_tried_again_and_what_was_clear_much_later() -> None:
    def trials(turns: float) -> list[int]:
        choice, found = TurnChoice(SETTLES), []
        for step in range(850):
            if choice.note(turns if choice.takes_turns else 1.0) is not None:
                found.append(step + 1)
        return found

    alike, clear = trials(1.01), trials(2.0)
    assert 5 <= len(alike) <= 850 // LEAST_REST
    assert clear == [CLEAR_TRIAL]


def test_steps_that_had_more_to_do_do_not_count() -> None:
    """Each second step is slow for a reason of its own."""
    choice, told = TurnChoice(SETTLES), []
    for step in range(2 * LONGEST):
        if (found := choice.note(None if step % 2 else {False: 1.0, True: 1.4}[choice.takes_turns])) is not None:
            told.append(found)
    assert told[0] == (1.0, 1.4)
    assert not choice.takes_turns


def fleet_of(engines: int = 1, tried: bool = True, **settings: Any) -> Any:
    config = RunConfig(**{"max_staleness": 1, **settings})
    config.rollout.engine = "vllm"
    threads: dict[str, list[int]] = {"Rollout-0": [], "Trainer-policy-0": []}
    trial = Trial(Threads(1, 1), {1: 1.0, 2: 1.01}, {1: 2.0, 2: 1.1})
    fleet = SimpleNamespace(
        config=config, trials={SharedNode(2, engines, 1): trial} if tried else {}, takes_turns=False, threads=threads
    )
    handles = {name: FakeHandle(use_threads=told.append) for name, told in threads.items()}
    of_role = {"rollout": "Rollout-0", "trainer": "Trainer-policy-0"}
    fleet.role = lambda role: [(of_role[role], handles[of_role[role]])]

    def threads_of(name: str) -> int:
        chosen = trial.alone(SharedNode(2, engines, 1)) if fleet.takes_turns else trial.threads
        return chosen.rollout if name == "Rollout-0" else chosen.trainer

    fleet.threads_of = threads_of
    return fleet


def drive(fleet: Any, seconds: dict[bool, float], steps: int, plain: bool = True) -> tuple[CpuTurns, list[str]]:
    notes: list[str] = []
    turns = CpuTurns(fleet, notes.append)

    async def go() -> None:
        now = 0.0
        for _ in range(steps):
            now += seconds[fleet.takes_turns]
            await turns.after(now, is_plain=plain)

    asyncio.run(go())
    return turns, notes


def test_in_turns_each_side_has_its_threads_and_prompts_of_one_step() -> None:
    fleet = fleet_of()
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, CLEAR_TRIAL)
    assert notes == ["engines and ranks take turns on the CPUs: 1.50 s a step at the same time, 1.00 in turns"]
    assert fleet.threads == {"Rollout-0": [2, 1, 2], "Trainer-policy-0": [2, 1, 2]}  # two pairs, and the choice
    assert turns.max_active_groups == fleet.config.trainer.groups_per_step


def test_back_at_the_same_time_all_is_as_the_trial_has_found() -> None:
    fleet = fleet_of()
    turns, notes = drive(fleet, {False: 1.0, True: 1.5}, CLEAR_TRIAL)
    assert notes == [
        "engines and ranks work at the same time on the CPUs: 1.00 s a step at the same time, 1.50 in turns"
    ]
    assert fleet.threads == {"Rollout-0": [2, 1], "Trainer-policy-0": [2, 1]}
    assert turns.max_active_groups is None


def test_a_fleet_that_was_taken_over_goes_on_in_the_way_that_it_has() -> None:
    fleet = fleet_of()
    fleet.takes_turns = True
    turns = CpuTurns(fleet, [].append)
    assert turns.max_active_groups == fleet.config.trainer.groups_per_step
    drive(fleet, {False: 1.5, True: 1.0}, CLEAR_TRIAL)
    assert fleet.takes_turns
    assert fleet.threads == {"Rollout-0": [1, 2], "Trainer-policy-0": [1, 2]}  # the other way was tried


@pytest.mark.parametrize("fleet", [fleet_of(tried=False), fleet_of(engines=2), fleet_of(max_staleness=0)])
def test_where_they_share_no_cores_or_take_turns_anyway_nothing_is_tried(fleet: Any) -> None:
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, 3 * LONGEST)
    assert (turns.max_active_groups, notes) == (None, [])


def test_steps_count_in_the_end_where_an_evaluation_follows_every_one() -> None:
    fleet = fleet_of()
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, MOST_LEFT_OUT - 1, plain=False)
    assert notes == []
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, MOST_LEFT_OUT + CLEAR_TRIAL, plain=False)
    assert len(notes) == 1
    assert turns.max_active_groups == fleet.config.trainer.groups_per_step


def test_fewer_groups_may_be_under_way_and_never_more_than_the_bound_allows() -> None:
    credits = Credits(max_active=8, groups_per_step=4, max_bytes=10**6)
    for _ in range(8):
        credits.admit()
    credits.trained(1, 4)
    credits.served(1, 4)
    assert credits.refusal(1, 0) == "credits"  # four are under way
    credits.trained(2, 4)
    credits.served(2, 99)
    for _ in range(8):
        assert credits.refusal(1, 0) is None
        credits.admit()
    assert credits.refusal(1, 0) == "credits"
    credits.served(2, 4)
    credits.served(2)
    assert credits.max_active == 8
