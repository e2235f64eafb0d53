"""Engines are looked at in turn, in two ways, and within a hundredth of a step's tokens."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WorkerDied
from penstock.orchestrator.control.engine_probe import (
    DOUBLED,
    LARGEST,
    MEAN,
    PROBE_S,
    SAMPLES,
    SCORES,
    TEMPERATURE,
    UNANSWERED,
    WORST,
    EngineProbe,
)
from penstock.workers.probing import ProbeAnswer, ProbeRow
from penstock.workers.trainer.probe import SHARE
from tests.virtual_time import run_virtually

ROWS = (
    ProbeRow(np.array([5, 6, 7, 8], np.int32), np.array([-1.0, -2.0], np.float32)),
    ProbeRow(np.array([5, 9], np.int32), np.array([-3.0], np.float32)),
)
MANY = 1000
"""Rows of a step whose budget is enough for all looks."""


class Engine:
    """Differs by `wrong` nats. `delay_s`: until it answers."""

    def __init__(self, wrong: float = 0.0, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self._wrong, self._delay_s, self._error = wrong, delay_s, error
        self.looks: list[tuple[int, ProbeRow | None, int]] = []
        self.probe = SimpleNamespace(remote=self._probe)

    async def _probe(self, version: int, row: ProbeRow | None, most_tokens: int) -> ProbeAnswer | None:
        self.looks.append((version, row, most_tokens))
        await asyncio.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        if row is not None:
            return ProbeAnswer(np.full(len(row.logprobs), self._wrong, np.float32))
        return ProbeAnswer(np.full(2, 2 * self._wrong, np.float32), 1 + self._wrong, self._wrong > 0)


def report_of(step: int, lengths: Sequence[int], probe: Sequence[ProbeRow] = ROWS) -> Any:
    rows: Any = SimpleNamespace(prompt_tokens_N=np.array(lengths), response_tokens_N=np.array(lengths))
    return SimpleNamespace(step=step, version=step - 1, probe=tuple(probe), rows=rows)


def measure(
    engines: dict[str, Engine],
    serving: dict[str, int] | None = None,
    *,
    steps: Sequence[int] = (8,),
    num_rows: int = MANY,
    max_length: int = 8,
) -> list[dict[str, float]]:
    """Metrics of each step. `serving`: versions of the engines; None: the trainer's."""
    fleet: Any = SimpleNamespace(role=lambda role: list(engines.items()))
    weights: Any = SimpleNamespace(serving=serving)
    probe = EngineProbe(fleet, weights, max_length)

    async def run() -> list[dict[str, float]]:
        found = []
        for step in steps:
            weights.serving = serving if serving is not None else dict.fromkeys(engines, step - 1)
            found.append(await probe.compare([report_of(step, [2] * num_rows), report_of(step, [], ())]))
        return found

    return list(run_virtually(run()))


def test_right_engines_differ_by_nothing() -> None:
    found = measure({"Rollout-0": Engine()})[0]
    assert found == {
        MEAN: 0.0, LARGEST: 0.0, WORST: 0.0, SCORES + "Rollout-0": 0.0, SAMPLES + "Rollout-0": 0.0,
        TEMPERATURE + "Rollout-0": 1.0,
    }  # fmt: skip


def test_what_is_wrong_is_said_of_its_engine() -> None:
    found = measure({"Rollout-0": Engine(), "Rollout-1": Engine(wrong=0.5)})[0]
    expected = {
        MEAN: 1 / 6, LARGEST: 0.5, WORST: 0.5, SCORES + "Rollout-0": 0.0, SCORES + "Rollout-1": 0.5,
        SAMPLES + "Rollout-0": 0.0, SAMPLES + "Rollout-1": 1.0, TEMPERATURE + "Rollout-0": 1.0,
        TEMPERATURE + "Rollout-1": 1.5, DOUBLED + "Rollout-1": 1.0,
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_an_engine_with_another_version_is_not_asked() -> None:
    engines = {"Rollout-0": Engine(), "Rollout-1": Engine(wrong=1.0)}
    assert measure(engines, {"Rollout-0": 7, "Rollout-1": 6})[0][WORST] == 0.0
    assert engines["Rollout-1"].looks == []
    assert {version for version, *_ in engines["Rollout-0"].looks} == {7}


def test_an_engine_that_starts_has_the_models_own_version() -> None:
    assert measure({"Rollout-0": Engine()}, {}, steps=(1,))[0][MEAN] == 0.0
    assert measure({"Rollout-0": Engine()}, {}, steps=(4,))[0] == {}


def test_a_dead_engine_and_a_slow_one_are_counted_and_end_nothing() -> None:
    engines = {"Rollout-0": Engine(error=WorkerDied("gone")), "Rollout-1": Engine(delay_s=PROBE_S + 1)}
    assert measure(engines)[0] == {UNANSWERED: 4.0}


def test_a_row_that_leaves_an_engine_no_room_is_left_out() -> None:
    engine = Engine()
    measure({"Rollout-0": engine}, max_length=4, steps=(8, 9))
    assert [row is ROWS[1] for _, row, _ in engine.looks if row is not None] == [True, True]


def test_a_small_step_has_one_look_and_each_engine_its_turn() -> None:
    engines = {f"Rollout-{number}": Engine() for number in range(3)}
    found = measure(engines, num_rows=4, steps=range(1, 13))
    assert all(sum(name.startswith((SCORES, SAMPLES)) for name in line) == 1 for line in found)
    for engine in engines.values():
        assert Counter(row is None for _, row, _ in engine.looks) == {True: 2, False: 2}
    assert all(SCORES + f"Rollout-{number}" in found[number] for number in range(3)), "trainer's rows come first"


def test_many_engines_share_the_rows_of_a_step() -> None:
    engines = {f"Rollout-{number}": Engine() for number in range(64)}
    measure(engines, steps=range(1, 41))
    for engine in engines.values():
        assert {row is None for _, row, _ in engine.looks} == {True, False}
    dealt = Counter(len(row.token_ids) for engine in engines.values() for _, row, _ in engine.looks if row is not None)
    assert dealt.keys() == {4, 2}, "not all rows are dealt"


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 60), min_size=1, max_size=400),
    st.lists(st.integers(2, 100), min_size=1, max_size=5),
)
@pytest.mark.histories
def test_a_hundredth_of_a_steps_tokens_is_scored_or_one_row(num: int, lengths: list[int], rows: list[int]) -> None:
    engines = {f"Rollout-{number}": Engine() for number in range(num)}
    fleet: Any = SimpleNamespace(role=lambda role: list(engines.items()))
    weights: Any = SimpleNamespace(serving=dict.fromkeys(engines, 2))
    probe = EngineProbe(fleet, weights, 1000)
    probed = [ProbeRow(np.zeros(length, np.int32), np.zeros(1, np.float32)) for length in rows]
    run_virtually(probe.compare([report_of(3, lengths, probed)]))
    scored = [most for engine in engines.values() for _, _, most in engine.looks]
    longest = max(*(2 * length for length in lengths), *rows)
    assert scored
    assert sum(scored) <= max(SHARE * 2 * sum(lengths), longest)
    assert all(most == len(row.token_ids) for engine in engines.values() for _, row, most in engine.looks if row)
