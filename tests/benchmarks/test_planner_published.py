"""What others have published, as rows that the planner predicts: their factors are found, and orders are counted."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from benchmarks.planner import gains, published
from benchmarks.planner.published_rows import FILE, Durations, step_s
from benchmarks.planner.published_rows import rows as rows_of
from penstock.conf.rollout import Precision
from penstock.conf.trainer import TrainerConfig
from penstock.planner.cost_model import SYSTEMS, Efficiencies, EngineCosts, RankCosts, kernels_of
from penstock.planner.hardware import KINDS
from penstock.planner.plan_inputs import known_shape

H100 = KINDS["h100"]
FACTS = yaml.safe_load(FILE.read_text(encoding="utf-8"))
WRITE_RATE = (1.2e9, 2.2e9)
"""Bytes a second at which prime-rl writes the weights of a full update: its tokens a second count the time, its seconds
of a step do not."""


def test_each_row_is_predicted_in_seconds_of_its_size() -> None:
    """With the factors as they are. Nothing here is a bar: these are in the benchmark."""
    rows = rows_of()
    assert {row.system for row in rows} == {"prime-rl", "torchtitan", "nemo-rl", "verl"}
    assert all(row.measured / 4 < row.predict(Efficiencies(), False) < row.measured * 4 for row in rows)


RUNS = [*FACTS["runs"], *FACTS["held_out"]]


@pytest.mark.parametrize("one", [one for one in RUNS if "tokens_per_s" in one], ids=lambda one: one["name"])
def test_a_run_trains_as_many_tokens_as_its_source_counts(one: dict[str, Any]) -> None:
    gpus = one["gpus"][0] if one["colocated"] else sum(one["gpus"])
    counted = one["tokens_per_s"] * gpus * one["step_s"]
    assert one["groups"] * one["size"] * (one["prompt"] + one["mean"]) == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("one", FACTS["trainers"], ids=lambda one: one["name"])
def test_an_update_trains_as_many_tokens_as_its_source_counts(one: dict[str, Any]) -> None:
    shape = known_shape(one["model"])
    assert shape is not None
    for length, seconds in one["seconds"].items():
        counted_s = 2 * length * one["gpus"] / one["tokens_per_s"][length]
        if one["system"] == "prime-rl" and not one["lora"]:
            low, high = (2 * shape.num_parameters / rate for rate in reversed(WRITE_RATE))
            assert low < counted_s - seconds < high
        else:
            assert counted_s == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize("one", FACTS["runs"], ids=lambda one: one["name"])
def test_factors_are_fitted_with_measured_kernels_where_there_are_any(one: dict[str, Any]) -> None:
    shape, kind = known_shape(one["model"]), KINDS[one["kind"]]
    assert shape is not None
    assert (kernels_of(shape, kind, one["engine_tp"], Precision()).measured is not None) == (kind.name in SYSTEMS)


def durations(scored: int = 0, **own: Any) -> Durations:
    """A rank of Qwen3-0.6B, which makes micro-batches of 8,192 tokens."""
    shape = known_shape("Qwen/Qwen3-0.6B")
    assert shape is not None
    config = TrainerConfig(num_gpus_per_rank=1, dtype="bfloat16", max_tokens_per_microbatch=8192)
    engine, rank = EngineCosts(shape, H100, Efficiencies()), RankCosts(shape, H100, Efficiencies(), config)
    return Durations(engine, rank, scored, **own)


def test_stages_of_a_pipeline_wait_while_it_fills_and_drains() -> None:
    """Eight micro-batches by four stages take as long as eleven; a single one as long as four."""
    eight, one = [[8192] * 8], [[4096]]
    assert durations(stages=4).update_s(eight) == pytest.approx(durations().update_s(eight) * 11 / 8)
    assert durations(stages=4).update_s(one) == pytest.approx(durations().update_s(one) * 4)


def test_tokens_go_to_experts_and_back_in_each_pass() -> None:
    """Forward, forward again, backward, and one forward pass beside the update: eight times."""
    rows = [[8192] * 8]
    more = durations(scored=1, transfer_s=1e-6).update_s(rows) - durations(scored=1).update_s(rows)
    assert more == pytest.approx(8 * 8 * 8192 * 1e-6)


def test_experts_on_other_nodes_cost_the_network() -> None:
    """Experts on one node exchange nothing over the network, of which 16 ranks on two nodes have half."""
    (one,) = (one for one in FACTS["held_out"] if one["name"] == "Qwen3-235B sync 128")

    def seconds(**own: int) -> float:
        return step_s(one | {"train": one["train"] | own}, one["mean"], Efficiencies(), False)

    assert seconds(ep=8) < seconds(ep=16) < seconds(ep=32)


def test_each_row_left_out_in_turn_is_predicted_within_the_bars() -> None:
    """The factors of the plan, fitted to all rows but one, predict that one."""
    found = published.left_out_in_turn(rows_of())
    errors, ordered = published.errors(found, "predicted_s"), published.ordered(found, "predicted_s")
    assert sum(errors) / len(errors) <= published.MEAN_ERROR_ALONE
    assert len(ordered) >= 15
    assert sum(ordered) / len(ordered) >= published.LEAST_ORDERED_ALONE


def test_factors_of_the_plan_are_those_that_are_fitted_to_all_rows() -> None:
    found = published.fitted(rows_of(), Efficiencies())
    for name in published.FITTED:
        assert getattr(Efficiencies(), name) == pytest.approx(getattr(found, name), rel=0.03), name


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
    assert published.ordered(rounds, "predicted_s") == [False, True]


def test_a_gain_of_asynchrony_is_the_quotient_of_two_steps() -> None:
    """In lockstep there is next to none: the engines have a quarter less."""
    found = gains.measure(True, None)
    assert [one["name"] for one in found] == ["1.5B", "7B"]
    assert all(one["lockstep"] < 1.2 < one["gain"] for one in found)
