"""The benchmark of checkpoints runs through; its figures are for quiet machines."""

import pytest


@pytest.mark.slow
def test_a_quick_run_writes_its_table_and_its_target(run_quickly):
    result, printed = run_quickly("checkpoint", "--rounds", "1")
    assert "held up" in printed
    assert result["benchmark"] == "checkpoint"
    assert result["rounds"][0]["synchronous"]["bytes"] > 2.9e6 * 12
    assert 0 < result["rounds"][0]["keep_s"] < 10
    assert [target["comparison"] for target in result["targets"]] == ["<=", "<="]
