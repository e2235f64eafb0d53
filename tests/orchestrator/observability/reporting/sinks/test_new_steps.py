"""A tracker hears each number of each step once."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.reporting.sinks import mlflow, sender, wandb
from penstock.orchestrator.observability.reporting.sinks.sender import NewSteps

LINES = st.lists(st.tuples(st.integers(0, 5), st.dictionaries(st.sampled_from("abc"), st.just(1.0))))


def test_the_examples_of_the_trackers_hold() -> None:
    assert [doctest.testmod(module).failed for module in (sender, mlflow, wandb)] == [0, 0, 0]


@given(LINES, st.none() | st.integers(0, 3))
def test_steps_grow_and_no_number_comes_twice(lines: list[tuple[int, dict[str, float]]], after: int | None) -> None:
    new = NewSteps(after)
    heard = [(step, name) for step, numbers in lines for name in new.of(step, numbers)]
    steps = [step for step, _ in heard]
    assert steps == sorted(steps)
    assert len(set(heard)) == len(heard)
    assert all(after is None or step > after for step in steps)


@given(st.lists(st.integers(0, 50), unique=True))
def test_a_run_without_repetitions_loses_nothing(steps: list[int]) -> None:
    new = NewSteps(None)
    assert all(new.of(step, {"a": 1.0}) == {"a": 1.0} for step in sorted(steps))
