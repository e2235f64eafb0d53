"""The benchmark of the sandbox runs through; its figures are for quiet machines."""

import pytest

pytestmark = pytest.mark.real


def test_a_quick_run_writes_its_table_and_its_targets(run_quickly):
    result, printed = run_quickly("sandbox", "--rounds", "1")
    assert "median /s" in printed
    assert [entry["kind"] for entry in result["rounds"]] == ["warm", "cold"]
    assert all(entry["per_s"] > 0 for entry in result["rounds"])
    assert [(target["comparison"], target["target"]) for target in result["targets"]] == [(">=", 300.0), (">=", 25.0)]
