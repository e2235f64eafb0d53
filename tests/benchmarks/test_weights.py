"""`benchmarks.weights --quick` runs and writes what it promises; what it measures is not judged here."""

import math

import pytest
import torch

from benchmarks.peers.weights_trainer import buckets_of


def test_buckets_keep_the_order_and_hold_at_least_one_tensor():
    named = [(str(size), torch.empty(size)) for size in (3, 2, 9, 1, 4, 1)]
    assert [[name for name, _ in bucket] for bucket in buckets_of(named, 5)] == [["3", "2"], ["9"], ["1", "4"], ["1"]]


@pytest.mark.real
@pytest.mark.soak("the other quick runs of this folder")
def test_a_quick_run_measures_both_sides(run_quickly):
    pytest.importorskip("vllm", reason="vLLM is not installed: the benchmark needs its engine")
    content, _ = run_quickly("weights")
    assert content["benchmark"] == "weights"
    ours, naive = content["rounds"]
    assert [ours["side"], naive["side"]] == ["Penstock", "naive"]
    assert naive["bytes"] == pytest.approx(2 * naive["parameters"]), "cast before it is shipped"
    assert naive["buckets"] >= 1
    assert len(content["targets"]) == 5
    assert all(math.isfinite(target["value"]) and target["value"] > 0 for target in content["targets"])
