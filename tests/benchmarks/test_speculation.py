"""What the benchmark of drafted tokens makes of its rounds."""

from typing import Any

import pytest

from benchmarks import speculation


def rounds_of(**speeds: list[list[float]]) -> list[dict[str, Any]]:
    """Rounds of one group alone: of each method, tokens a second of the repeats of each round. Half of the tokens that
    are drafted are accepted."""
    return [
        {
            "round": number, "workload": workload, "method": method, "tokens_per_s": speed,
            "drafted": 0.5 * (method != "none"), "accepted": 0.25 if method != "none" else None,
        }
        for workload in speculation.WORKLOADS
        for method, rounds in speeds.items()
        for number, repeats in enumerate(rounds)
        for speed in repeats
    ]  # fmt: skip


def test_drafts_are_compared_with_none_within_a_round() -> None:
    rounds = rounds_of(none=[[100.0, 100.0, 900.0], [10.0, 10.0, 10.0]], ngram=[[150.0, 1.0, 150.0], [13.0] * 3])
    assert speculation.speeds(rounds, "one group", "none") == [100, 10]
    assert speculation.ratios(rounds, "one group", "ngram") == pytest.approx([1.5, 1.3])


def test_gains_are_judged_where_tokens_are_free() -> None:
    rounds = rounds_of(none=[[10.0]] * 3, ngram=[[11.0], [12.0], [13.0]], draft=[[11.0]] * 3)
    judged = {target.name: target.met for target in speculation.targets_of(rounds)}
    assert judged == {
        "a step, ngram": True, "a step, draft": False, "one group, ngram": True, "one group, draft": False,
    }  # fmt: skip


def test_a_table_says_what_was_drafted_and_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    speculation.print_rounds(rounds_of(none=[[10.0]], ngram=[[12.0]]))
    shown = [line for line in capsys.readouterr().out.splitlines() if "one group" in line]
    assert [[cell.strip() for cell in line.split("│")[2:-1]] for line in shown] == [
        ["none", "10 (10-10)", "1.00 (1.00-1.00)", "0.00", "-"],
        ["ngram", "12 (12-12)", "1.20 (1.20-1.20)", "0.50", "0.25"],
    ]
