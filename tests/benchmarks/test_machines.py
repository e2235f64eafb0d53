"""Benchmarks of many machines run and write what they promise. Their figures are not judged here."""

import pytest

pytestmark = pytest.mark.real


def test_the_simulated_chain_is_that_of_the_model_and_leaves_no_node_behind(run_quickly):
    written, _ = run_quickly("simulated_chain")
    assert {one["dying"] for one in written["rounds"]} == {"none", "processes", "machines"}
    assert all(target["met"] for target in written["targets"])


@pytest.mark.machines
@pytest.mark.soak("the other quick runs of this folder")
def test_the_quick_run_measures_every_way_between_machines(run_quickly):
    written, _ = run_quickly("machines")
    names = ("weights", "changes", "rows", "calls")
    parts = {name: [one for one in written["rounds"] if one["part"] == name] for name in names}
    assert [one["way"] for one in parts["weights"]] == ["chain", "star", "process killed", "machine lost", "Ray"]
    assert all(one["seconds"] > 0.5 * one["model_s"] for one in parts["weights"])
    assert [(one["way"], one["side"]) for one in parts["changes"]] == [
        ("steps", "whole"), ("steps", "as a run"), ("anew", "whole"), ("anew", "as a run"),
    ]  # fmt: skip
    assert all(0 < one["received_share"] <= 1 for one in parts["changes"])
    assert [one["reader"] for one in parts["rows"]] == ["far", "near"]
    assert sorted((one["way"], one["in_flight"]) for one in parts["calls"]) == [
        ("connection", 1), ("connection", 32), ("ray", 1), ("ray", 32),
    ]  # fmt: skip
    assert len(written["targets"]) == 11


@pytest.mark.soak("the other quick runs of this folder")
def test_the_quick_run_brings_a_version_over_each_number_of_lanes(run_quickly):
    written, _ = run_quickly("relay")
    assert [one["lanes"] for one in written["rounds"]] == [1, 2, 4]
    assert all(one["receive_s"] > 0 and one["seconds"] > 0 for one in written["rounds"])
