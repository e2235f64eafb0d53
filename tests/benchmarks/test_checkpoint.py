"""The benchmark of checkpoints runs through, and compares what belongs together; its figures are for quiet machines."""

import math

import pytest

from benchmarks import checkpoint


def made(alone, waited, not_waited):
    """A round, in which the machine took so long for an update alone; seconds by which each kind held it up."""
    saves = {"synchronous": waited, "asynchronous": not_waited}
    return {
        kind: {"alone_s": alone, "with_update_s": alone + more, "blocked_s": more / 2} for kind, more in saves.items()
    }


def test_a_save_is_compared_with_the_update_right_before_it():
    """Rounds of a machine that becomes three times slower: what is held up is the same in each."""
    rounds = [made(1.0, 4.0, 0.5), made(2.0, 4.0, 0.5), made(3.0, 4.0, 0.5)]
    assert checkpoint.held("asynchronous")(rounds) == 0.5
    assert checkpoint.between(rounds, checkpoint.held("asynchronous")) == "0.50 (0.50 to 0.50)"
    assert checkpoint.share(checkpoint.held)(rounds) == checkpoint.share(checkpoint.blocked)(rounds) == 0.125


def test_updates_that_are_shorter_beside_a_save_are_held_up_by_nothing():
    assert checkpoint.share(checkpoint.held)([made(1.0, 2.0, -0.5)]) == 0.0


def test_what_some_rounds_measured_is_their_median_and_without_room_no_number():
    rounds = [{"keep_s": 1.0}, {"keep_s": 3.0}, {}]
    assert checkpoint.median("keep_s")(rounds) == 2.0
    assert math.isnan(checkpoint.median("keep_s")([*rounds, {"keep_s": math.nan}]))


@pytest.mark.real
def test_a_quick_run_writes_its_table_and_its_target(run_quickly):
    result, printed = run_quickly("checkpoint", "--rounds", "2")
    assert "held up" in printed
    assert result["benchmark"] == "checkpoint"
    assert all(entry["synchronous"]["bytes"] > 2.9e6 * 12 for entry in result["rounds"])
    assert 0 < result["rounds"][0]["keep_s"] < 10
    assert [list(entry)[3:5] for entry in result["rounds"]] == [list(checkpoint.KINDS), list(checkpoint.KINDS[::-1])]
    assert [target["comparison"] for target in result["targets"]] == ["<=", "<="]
