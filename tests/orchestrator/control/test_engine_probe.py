"""Engines score rows of a step again under the trainer's weights, and what differs is the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import WorkerDied
from penstock.orchestrator.control.engine_probe import LARGEST, MEAN, PROBE_S, UNANSWERED, WORST, EngineProbe
from penstock.workers.protocols import SampleCall, SampleOutput
from penstock.workers.trainer.step_report import ProbeRow
from tests.virtual_time import run_virtually

ROWS = (
    ProbeRow(np.array([5, 6, 7, 8], np.int32), np.array([-1.0, -2.0], np.float32)),
    ProbeRow(np.array([5, 9], np.int32), np.array([-3.0], np.float32)),
)
SCORES = {4: [np.nan, -9.0, -1.0, -2.0], 2: [np.nan, -3.0]}
"""What the trainer's weights give each prompt token, by the number of tokens."""


class Engine:
    """Scores as the trainer's weights do, but for `wrong` nats. `delay_s`: until it answers."""

    def __init__(self, wrong: float = 0.0, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self._wrong, self._delay_s, self._error = wrong, delay_s, error
        self.num_calls = 0
        self.sample = SimpleNamespace(remote=self._sample)

    async def _sample(self, adapter: str | None, call: SampleCall, request_id: str) -> SampleOutput:
        self.num_calls += 1
        assert adapter is None
        assert (call.num_samples, call.sampling.max_tokens, call.prompt_logprobs) == (1, 1, True)
        await asyncio.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        return SampleOutput([], np.array(SCORES[len(call.prompt_ids)], np.float32) + np.float32(self._wrong))


def measure(engines: dict[str, Engine], serving: dict[str, int], version: int = 7, max_length: int = 8) -> Any:
    fleet: Any = SimpleNamespace(role=lambda role: list(engines.items()))
    weights: Any = SimpleNamespace(serving=serving)
    report: Any = SimpleNamespace(step=version + 1, version=version, probe=ROWS)
    silent: Any = SimpleNamespace(step=version + 1, version=version, probe=())
    return run_virtually(EngineProbe(fleet, weights, max_length).compare([report, silent]))


def test_right_engines_differ_by_nothing() -> None:
    found = measure({"Rollout-0": Engine(), "Rollout-1": Engine()}, {"Rollout-0": 7, "Rollout-1": 7})
    assert found == {MEAN: 0.0, LARGEST: 0.0, WORST: 0.0}


def test_the_worst_engine_is_not_hidden_by_the_right_ones() -> None:
    found = measure({"Rollout-0": Engine(), "Rollout-1": Engine(wrong=0.5)}, {"Rollout-0": 7, "Rollout-1": 7})
    assert found == pytest.approx({MEAN: 0.25, LARGEST: 0.5, WORST: 0.5})


def test_an_engine_with_another_version_is_not_asked() -> None:
    engines = {"Rollout-0": Engine(), "Rollout-1": Engine(wrong=1.0)}
    assert measure(engines, {"Rollout-0": 7, "Rollout-1": 6})[WORST] == 0.0
    assert (engines["Rollout-0"].num_calls, engines["Rollout-1"].num_calls) == (2, 0)


def test_an_engine_that_starts_has_the_models_own_version() -> None:
    assert measure({"Rollout-0": Engine()}, {}, version=0)[MEAN] == 0.0
    assert measure({"Rollout-0": Engine()}, {}, version=3) == {}


def test_a_dead_engine_and_a_slow_one_are_counted_and_end_nothing() -> None:
    engines = {"Rollout-0": Engine(error=WorkerDied("gone")), "Rollout-1": Engine(delay_s=PROBE_S + 1)}
    assert measure(engines, {"Rollout-0": 7, "Rollout-1": 7}) == {UNANSWERED: 4.0}


def test_a_row_that_leaves_an_engine_no_room_is_left_out() -> None:
    engine = Engine()
    measure({"Rollout-0": engine}, {"Rollout-0": 7}, max_length=4)
    assert engine.num_calls == 1
