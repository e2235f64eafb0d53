"""What faults cost of a run's time: by hand, and for any history between nothing and everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.recovery.decisions import EffectiveTime


def training(num_engines: int = 4) -> EffectiveTime:
    """Steps of ten seconds and a hundred tokens; the third one is under way since second 20."""
    time = EffectiveTime()
    assert time.share(5.0) is None
    time.begin(0, num_engines, 0.0)
    time.trained(1, 100, 10.0)
    time.trained(2, 100, 20.0)
    return time


def test_a_run_without_faults_is_wholly_effective() -> None:
    assert training().share(20.0) == 1.0


def test_an_engine_that_is_away_costs_its_share_of_the_engines() -> None:
    time = training()
    time.away("Rollout-0", 20.0)
    time.away("Rollout-1", 24.0)
    time.back("Rollout-0", 28.0)
    time.back("Rollout-1", 28.0)
    assert time.lost_s(40.0) == pytest.approx(4 * 1 / 4 + 4 * 2 / 4)
    assert time.share(40.0) == pytest.approx(1 - 3 / 40)


def test_engines_that_join_make_the_share_of_one_smaller() -> None:
    time = training(num_engines=2)
    time.away("Rollout-0", 20.0)
    time.trained(3, 100, 30.0, num_serving=3)
    assert time.lost_s(40.0) == pytest.approx(10 / 2 + 10 / 4)


def test_a_trainer_costs_its_restart_and_what_it_had_done_of_the_step() -> None:
    """Lost 6 s into step 3, there again after 4 s: 6 s later the run is where it was."""
    time = training()
    time.lost(26.0)
    time.found(30.0)
    assert time.lost_s(33.0) == pytest.approx(7.0)
    assert time.lost_s(50.0) == pytest.approx(10.0)


def test_a_step_that_is_done_sooner_than_before_ends_the_loss() -> None:
    time = training()
    time.lost(29.0)
    time.found(30.0)
    time.trained(3, 100, 32.0)
    assert time.lost_s(50.0) == pytest.approx(3.0)


def test_a_return_costs_the_steps_that_are_taken_again_and_their_tokens() -> None:
    """From step 2 to step 0. Lost at second 25, steps again from 40 on, step 2 done at 60, then 5 s of step 3."""
    time = training()
    time.lost(25.0)
    assert time.trained_after(0) == (2, 200)
    assert time.trained_after(1) == (1, 100)
    time.begin(0, 4, 40.0)
    assert time.trained_after(0) == (0, 0)
    time.trained(1, 100, 50.0)
    time.trained(2, 100, 60.0)
    time.trained(3, 100, 70.0)
    assert time.lost_s(100.0) == pytest.approx(40.0)


def test_a_second_loss_on_the_way_back_is_one_loss() -> None:
    time = training()
    time.lost(25.0)
    time.begin(0, 4, 30.0)
    time.trained(1, 100, 40.0)
    time.lost(45.0)
    time.found(50.0)
    time.trained(2, 100, 60.0)
    assert time.lost_s(65.0) == pytest.approx(40.0)
    assert time.lost_s(90.0) == pytest.approx(40.0)


def test_a_restart_and_a_return_that_fail_are_the_same_loss() -> None:
    """Lost 5 s into step 3, and again while nobody takes steps."""
    time = training()
    for now in (25.0, 30.0, 40.0):
        time.lost(now)
    time.begin(2, 4, 50.0)
    assert time.lost_s(100.0) == pytest.approx(30.0)


def test_engines_that_are_away_while_the_run_is_behind_cost_nothing_more() -> None:
    time = training()
    time.away("Rollout-0", 20.0)
    time.lost(20.0)
    time.found(30.0)
    assert time.lost_s(34.0) == pytest.approx(10.0 + 4 / 4)


def test_what_is_lost_before_the_first_step_is_not_counted() -> None:
    time = EffectiveTime()
    time.lost(1.0)
    time.begin(3, 1, 10.0)
    assert time.share(20.0) == 1.0


EVENTS = st.sampled_from(["train", "lose", "find", "return", "away", "back"])


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 10.0)), max_size=30))
def test_the_share_is_one_and_lost_time_no_more_than_there_was(events: list[tuple[str, float]]) -> None:
    time, now, step, before = EffectiveTime(), 100.0, 0, 0.0
    time.begin(0, 2, now)
    for kind, seconds in events:
        now += seconds
        if kind == "train":
            step += 1
            time.trained(step, 10, now)
        elif kind == "lose":
            time.lost(now)
        elif kind == "find":
            time.found(now)
        elif kind == "return":
            time.lost(now)
            assert time.trained_after(step // 2) == (step - step // 2, 10 * (step - step // 2))
            time.begin(step // 2, 2, now)
            step //= 2
        elif kind == "away":
            time.away("Rollout-0", now)
        else:
            time.back("Rollout-0", now)
        lost_s = time.lost_s(now)
        assert before <= lost_s <= now - 100.0 + 1e-6
        before = lost_s
    share = time.share(now + 1.0)
    assert share is not None
    assert 0.0 <= share <= 1.0
