"""Which limit an execution passed, by what its keeper has measured."""

from dataclasses import replace

import pytest

from penstock.workers.sandbox.limits import Limits
from penstock.workers.sandbox.outcome import Ending, Failed, Value, outcome_of, reason_of, results_of

LIMITS = Limits(cpu_s=2.0, wall_s=5.0, output_bytes=100)
WELL = Ending(status=0, in_time=True, cpu_s=0.1, seconds=0.2)
KILLED = 9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "exited"),
        ({"status": 256}, "exited"),
        ({"in_time": False, "status": KILLED, "cpu_s": 1.9}, "timeout_wall"),
        ({"status": KILLED, "cpu_s": 1.98}, "timeout_cpu"),
        ({"status": 0, "cpu_s": 2.5}, "timeout_cpu"),
        ({"status": 0, "cpu_s": 1.98}, "exited"),
        ({"status": KILLED, "cpu_s": 0.5}, "signal"),
        ({"status": 11}, "signal"),
        ({"out_of_memory": True, "lost": True, "in_time": False}, "memory"),
        ({"status": KILLED, "lost": True}, "lost"),
        ({"stdout": b"x" * 101}, "output"),
        ({"stderr": b"x" * 101}, "output"),
        ({"answer": b"x" * 101}, "output"),
        ({"stdout": b"x" * 100}, "exited"),
    ],
)
def test_the_reason_is_the_limit_that_was_passed(change, reason):
    assert reason_of(replace(WELL, **change), LIMITS) == reason


def test_outputs_are_cut_and_made_readable():
    outcome = outcome_of(replace(WELL, stdout=b"\xff" + b"x" * 100, status=3 << 8), LIMITS)
    assert outcome.stdout == "\ufffd" + "x" * 99
    assert outcome.exit_code == 3
    assert not outcome.is_success
    assert outcome_of(replace(WELL, status=11), LIMITS).exit_code == -11


def test_each_call_has_a_result_whatever_was_written():
    answer = b'["value", 1]\n["raised", "E: x"]\n7\n["value"]\n["value", 1, 2]\n["value", 2'
    results = results_of(replace(WELL, answer=answer), 7, LIMITS)
    assert [type(result) for result in results] == [Value, *[Failed] * 6]
    assert [result.reason for result in results[1:] if isinstance(result, Failed)] == (
        ["raised", "not_data", "not_data", "not_data", "exited", "exited"]
    )
    assert results_of(replace(WELL, answer=b'["value", 1]\n["value", 2]\n'), 1, LIMITS) == [Value(1)]
    assert results_of(replace(WELL, answer=b'["unready", "E"]\n'), 2, LIMITS) == [Failed("unready", "E")] * 2
    assert results_of(replace(WELL, answer=b"x" * 101), 1, LIMITS)[0] == Failed("output", "more than 100 bytes")
