"""What others have published, as rows that the planner predicts: their factors are found, and orders are counted."""

from dataclasses import replace

from benchmarks.planner import gains, published
from benchmarks.planner.published_rows import rows as rows_of
from penstock.orchestrator.planning.costs.efficiencies import Efficiencies


def test_each_row_is_predicted_in_seconds_of_its_size() -> None:
    """With the factors as they are. Nothing here is a bar: these are in the benchmark."""
    rows = rows_of()
    assert {row.system for row in rows} == {"prime-rl", "torchtitan", "nemo-rl", "verl"}
    assert all(row.measured / 4 < row.predict(Efficiencies(), False) < row.measured * 4 for row in rows)


def test_factors_that_made_the_rows_are_found_again() -> None:
    true = replace(published.BEFORE, training=0.6, update_s=1.5)
    trainers = [row for row in rows_of() if row.system == "prime-rl" and "30B" not in row.name]
    made = [replace(row, measured=row.predict(true, False)) for row in trainers]
    found = published.fitted(made)
    assert abs(found.training - 0.6) < 0.03
    assert abs(found.update_s - 1.5) < 0.2


def test_pairs_of_one_workload_that_differ_are_in_order_or_not() -> None:
    rounds = [
        {"system": "a", "workload": "w", "measured_s": measured, "predicted_s": predicted}
        for measured, predicted in ((10.0, 3.0), (10.5, 2.0), (20.0, 2.5))
    ]
    rounds.append({"system": "a", "workload": "another", "measured_s": 1.0, "predicted_s": 100.0})
    assert published._ordered(rounds, "predicted_s") == [False, True]


def test_a_gain_of_asynchrony_is_the_quotient_of_two_steps() -> None:
    """In lockstep there is next to none: the engines have a quarter less."""
    found = gains.measure(True, None)
    assert [one["name"] for one in found] == ["1.5B", "7B"]
    assert all(one["lockstep"] < 1.2 < one["gain"] for one in found)
