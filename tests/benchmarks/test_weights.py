"""`benchmarks.weights --quick` runs and writes what it promises; what it measures is not judged here."""

import math

import pytest


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_a_quick_run_measures_both_sides(run_quickly):
    pytest.importorskip("vllm", reason="vLLM is not installed: the benchmark needs its engine")
    content, _ = run_quickly("weights")
    assert content["benchmark"] == "weights"
    assert {entry["side"] for entry in content["rounds"]} == {"Penstock", "naive"}
    assert len(content["targets"]) == 5
    assert all(math.isfinite(target["value"]) and target["value"] > 0 for target in content["targets"])
