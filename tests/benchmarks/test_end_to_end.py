"""The parts of the comparison with TRL's GRPO that need no TRL: who has which settings, and what is made of rounds."""

import subprocess
import sys

import pytest

from benchmarks import end_to_end, harness
from benchmarks.peers import penstock_grpo
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control import turns
from penstock.workers.runtime.processes import SETTINGS


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What each side would be started with: peer, words, Python, environment."""
    found = {}

    def child(name, peer, log, arguments, python=sys.executable, start=None, environment=None):
        found[name] = peer, arguments, python, environment

    monkeypatch.setattr(end_to_end, "Child", child)
    end_to_end.start_sides("fixed", tmp_path, end_to_end.SIDES)
    return found


def test_all_sides_have_the_environment_that_ranks_and_engines_have(started):
    assert set(started) == set(end_to_end.SIDES)
    assert [environment for *_, environment in started.values()] == [SETTINGS] * len(started)


@pytest.mark.parametrize(("side", "engine"), [("hf", "hf"), ("sync", "vllm"), ("async", "vllm")])
def test_sides_of_penstock_sample_as_by_default_with_their_engine(started, side, engine):
    peer, words, *_ = started[side]
    assert peer == "penstock_grpo"
    config = load_config(penstock_grpo.words_of(penstock_grpo.parse_arguments(words)))
    assert config.rollout.sampling.seeded
    assert config.rollout.engine == engine
    assert config.max_staleness == (1 if side == "async" else 0)


def rounds_of(**seconds):
    """Two rounds of each side that took so long."""
    return [
        {"workload": "fixed", "side": side, "round": number, "samples": 64, "tokens": 640, "seconds": taken}
        for side, some in seconds.items()
        for number, taken in enumerate(some)
    ]


def test_ratios_are_of_the_same_round_and_none_where_trl_was_left_out():
    rounds = rounds_of(trl=[4.0, 2.0], hf=[2.0, 4.0])
    assert end_to_end.ratios(rounds, "fixed", "hf") == [2.0, 0.5]
    assert end_to_end.ratios(rounds, "fixed", "hf", "tokens") == [2.0, 0.5]
    assert end_to_end.ratios(rounds_of(hf=[2.0]), "fixed", "hf") == []
    assert end_to_end.targets_of(rounds) == []


def test_penstock_is_compared_with_the_fastest_engine_by_which_trl_trains():
    rounds = rounds_of(trl=[4.0, 4.0], trl_continuous=[2.0, 2.0], trl_vllm=[1.0, 1.0], sync=[1.0, 1.0])
    assert end_to_end.fastest_trl(rounds, "fixed") == "trl_continuous"
    assert end_to_end.ratios(rounds, "fixed", "sync") == [2.0, 2.0]
    assert [target.value for target in end_to_end.targets_of(rounds)] == [2.0]


def test_async_is_compared_with_sync_of_the_same_round():
    rounds = rounds_of(sync=[4.0, 2.0, 3.0], **{"async": [4.0, 4.0, 2.0]})
    assert end_to_end.ratios_to("sync", rounds, "fixed", "async") == [1.0, 0.5, 1.5]
    (target,) = end_to_end.targets_of(rounds)
    assert (target.name, target.value, target.met) == ("fixed, async: samples/s over sync's", 1.0, True)


def test_the_first_round_of_async_is_as_long_as_its_longest_trial():
    settles = end_to_end.STALENESS["async"] + 2
    longest = 2 * settles + turns.TRIED + (settles + turns.TRIED) + (settles + 2 * turns.TRIED) * (turns.PAIRS - 1)
    assert end_to_end.FIRST_STEPS["async"] >= longest


@pytest.mark.real
def test_a_side_gets_its_environment_beside_that_of_the_benchmark(monkeypatch):
    monkeypatch.setenv("OF_THE_BENCHMARK", "outer")
    program = "import os; print(os.environ['OF_THE_BENCHMARK'], os.environ['OF_THE_SIDE'])"
    started = harness._start_here([sys.executable, "-c", program], {"OF_THE_SIDE": "own"}, stdout=subprocess.PIPE)
    assert started.communicate(timeout=900)[0].split() == ["outer", "own"]
