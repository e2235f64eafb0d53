"""What the benchmark of faults makes of a run's steps; the runs themselves are those of `make chaos`."""

import pytest

from benchmarks.faults import elastic, recovery


def test_time_lost_is_what_a_run_took_above_as_many_steps_without_faults():
    """Steps of 2 s; one is lost and made again, and the next comes 7 s late."""
    steps = [(10.0, 1), (12.0, 2), (14.0, 3), (15.0, 2), (23.0, 3), (25.0, 4)]
    assert recovery.lost_s(steps, 2.0) == 9.0


def test_a_step_without_faults_is_timed_up_to_the_death_of_the_command():
    steps = [(0.0, 1), (5.0, 2), (7.0, 3), (9.0, 4), (40.0, 3), (42.0, 4)]
    assert recovery.seconds_a_step(steps, 2, 4) == 2.0


def test_effective_time_is_that_of_a_fault_a_minute_whatever_the_run_had():
    assert recovery.effective({"lost_s": 60.0, "faults": 9}) == pytest.approx(0.9)
    assert recovery.effective({"lost_s": 0.0, "faults": 9}) == 1.0


def test_every_role_of_the_chaos_runs_is_struck():
    from tests.chaos import test_one_machine

    struck = {who.rpartition("-")[0] or who for who in recovery.MEMBERS}
    assert struck == {target.who.rpartition("-")[0] or target.who for target in test_one_machine.TARGETS}


def run_of(*phases):
    """Steps of `(engines, seconds, how many)`."""
    counts = [(engines, seconds) for engines, seconds, times in phases for _ in range(times)]
    return {step: pair[1] for step, pair in enumerate(counts, 1)}, {
        step: pair[0] for step, pair in enumerate(counts, 1)
    }


def test_a_step_is_compared_with_those_of_as_many_engines():
    """A step of 2 s is shorter than those of one engine, and twice as long as three make it."""
    found = elastic.compared(*run_of((1, 3.0, 9), (3, 3.0, 1), (3, 1.0, 6), (3, 2.0, 1), (1, 3.0, 9)))
    assert found == {"alone_s": 3.0, "three_s": 1.0, "longest": 2.0}


def test_a_step_in_which_engines_join_or_leave_has_the_fewest_of_them():
    found = elastic.compared(*run_of((1, 3.0, 9), (3, 2.5, 1), (3, 1.0, 7), (1, 3.0, 9)))
    assert found["longest"] == 1.0


def test_two_engines_are_expected_to_share_what_three_share():
    assert elastic.between(3.0, 1.0) == pytest.approx(1.5)
    assert elastic.between(2.0, 2.0) == 2.0
    found = elastic.compared(*run_of((1, 3.0, 9), (2, 3.0, 1), (2, 1.8, 1), (3, 1.8, 1), (3, 1.0, 7), (1, 3.0, 2)))
    assert found["longest"] == pytest.approx(1.8 / 1.5)
