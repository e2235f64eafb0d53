"""The benchmark runs, in each mode. Its figures of one update are not judged."""

import asyncio

import pytest

from benchmarks import updates_in_flight
from penstock.conf.rollout import ON_UPDATE


def test_reading_again_costs_a_simulated_run_and_finishing_first_more() -> None:
    recompute, keep, finish = (updates_in_flight.simulated(1_000, 1, mode, num_steps=8) for mode in ON_UPDATE)
    assert finish < recompute < keep


def test_a_mode_is_compared_within_its_round() -> None:
    speeds = {"recompute": (10.0, 20.0, 10.0), "keep": (11.0, 30.0, 12.0)}
    rounds = [{"mode": mode, "samples_per_s": rate} for mode, rates in speeds.items() for rate in rates]
    assert updates_in_flight.ratio(rounds, "keep") == pytest.approx(1.2)


@pytest.mark.real
@pytest.mark.usefixtures("warm_spawn")
def test_engines_sample_over_a_load_in_each_mode() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
    found = {one["mode"]: one for one in asyncio.run(updates_in_flight.measure(1, 1))}
    assert list(found) == list(ON_UPDATE)
    assert all(one["samples_per_s"] > 0 for one in found.values())
    assert found["recompute"]["read_again"] > 0
    assert found["keep"]["read_again"] == 0
    assert found["finish"]["paused_s"] == 0
