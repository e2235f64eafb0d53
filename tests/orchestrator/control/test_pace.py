"""The choice between working at the same time and taking turns."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.threads import SharedNode, Threads, Trial
from penstock.orchestrator.control.turns import RESTS, TRIED, CpuTurns, TurnChoice
from penstock.store.ledger.admission import Credits
from tests.fakes.actors import FakeHandle

SETTLES = 3
CYCLE = SETTLES + 2 * TRIED + SETTLES


def ways(seconds: dict[bool, float], steps: int, noise: float = 0.02, seed: int = 0) -> list[bool]:
    """Whether each step is made in turns, where steps take so long."""
    pace, draws, found = TurnChoice(SETTLES), random.Random(seed), []
    for _ in range(steps):
        found.append(pace.takes_turns)
        pace.note(seconds[pace.takes_turns] * (1 + noise * draws.uniform(-1, 1)))
    return found


@pytest.mark.parametrize(("together", "turns", "expected"), [(1.0, 1.3, False), (1.3, 1.0, True), (1.0, 0.98, False)])
def test_the_faster_way_is_kept_and_a_change_wants_a_reason(together: float, turns: float, expected: bool) -> None:
    found = ways({False: together, True: turns}, CYCLE + RESTS)
    assert found[: SETTLES + TRIED] == [False] * (SETTLES + TRIED)
    assert found[SETTLES + TRIED : CYCLE] == [True] * (CYCLE - SETTLES - TRIED)
    assert found[CYCLE:] == [expected] * RESTS


def test_the_other_way_is_tried_again_after_a_while() -> None:
    """Responses have grown meanwhile, so that what was slower is faster."""
    pace, found = TurnChoice(SETTLES), []
    for step in range(3 * (CYCLE + RESTS)):
        found.append(pace.takes_turns)
        pace.note({False: 1.0, True: 1.3 if step < CYCLE + RESTS else 0.7}[pace.takes_turns])
    assert found[-1]
    assert not any(found[CYCLE : CYCLE + RESTS])


def test_steps_that_had_more_to_do_do_not_count() -> None:
    """Each second step is slow for a reason of its own."""
    pace, told = TurnChoice(SETTLES), []
    for step in range(80):
        if (found := pace.note(None if step % 2 else {False: 1.0, True: 1.3}[pace.takes_turns])) is not None:
            told.append(found)
    assert told == [(1.0, 1.3)]
    assert not pace.takes_turns


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
        chosen = trial.alone if fleet.takes_turns else trial.threads
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
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, 1 + CYCLE)
    assert notes == ["engines and ranks take turns on the CPUs: 1.50 s a step at the same time, 1.00 in turns"]
    assert fleet.threads == {"Rollout-0": [1], "Trainer-policy-0": [2]}
    assert turns.max_active_groups == fleet.config.trainer.groups_per_step


def test_back_at_the_same_time_all_is_as_the_trial_has_found() -> None:
    fleet = fleet_of()
    turns, notes = drive(fleet, {False: 1.0, True: 1.5}, 1 + CYCLE)
    assert notes == [
        "engines and ranks work at the same time on the CPUs: 1.00 s a step at the same time, 1.50 in turns"
    ]
    assert fleet.threads == {"Rollout-0": [1, 1], "Trainer-policy-0": [2, 1]}
    assert turns.max_active_groups is None


def test_a_fleet_that_was_taken_over_goes_on_in_the_way_that_it_has() -> None:
    fleet = fleet_of()
    fleet.takes_turns = True
    turns = CpuTurns(fleet, [].append)
    assert turns.max_active_groups == fleet.config.trainer.groups_per_step
    drive(fleet, {False: 1.5, True: 1.0}, 1 + CYCLE)
    assert fleet.takes_turns
    assert fleet.threads == {"Rollout-0": [1, 1], "Trainer-policy-0": [1, 2]}  # the other way was tried


@pytest.mark.parametrize("fleet", [fleet_of(tried=False), fleet_of(engines=2), fleet_of(max_staleness=0)])
def test_where_they_share_no_cores_or_take_turns_anyway_nothing_is_tried(fleet: Any) -> None:
    turns, notes = drive(fleet, {False: 1.5, True: 1.0}, 3 * CYCLE)
    assert (turns.max_active_groups, notes) == (None, [])


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
