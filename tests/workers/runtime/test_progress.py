"""What a worker is at is told at any time, by its own clock."""

import pytest

from penstock.workers.runtime.serving import IDLE, LOADING, SERVING, STARTING, UPDATING, Phases, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_starts_and_then_is_in_the_phase_that_it_entered_last() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now += 3
    assert phases.progress() == Progress(STARTING, 3.0, 0, 0)
    phases.enter(SERVING)
    clock.now += 2
    assert phases.progress(7, 1) == Progress(SERVING, 2.0, 7, 1)


def test_after_a_phase_the_one_before_begins_anew() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.enter(SERVING)
    clock.now += 50
    with phases.within(LOADING):
        clock.now += 4
        assert phases.progress() == Progress(LOADING, 4.0)
    clock.now += 1
    assert phases.progress() == Progress(SERVING, 1.0)


def test_a_phase_that_fails_is_over_too() -> None:
    phases = Phases(Clock())
    phases.enter(IDLE)
    with pytest.raises(ValueError, match="a bug"), phases.within(UPDATING):
        raise ValueError("a bug")
    assert phases.progress().phase == IDLE
