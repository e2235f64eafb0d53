"""Engines that sample from whole models by their names, against plain transformers; each test holds for both."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import DataError, UnknownAdapter
from penstock.workers.protocols import WHOLE, AdapterLimits, SampleCall, SampleOutput, Sampling
from tests.workers.rollout.adapter_states import model_with, said_of, whole_state
from tests.workers.rollout.conftest import VLLM, EngineUnderTest

pytestmark = pytest.mark.real

PROMPT = [20, 14, 21, 32, 50, 7, 7, 61]
CALL = SampleCall(PROMPT, 2, Sampling(temperature=0.8, max_tokens=8, seed=5, ignore_eos=True))
NEAR = {"hf": {"atol": 1e-6, "rtol": 1e-6}, "vllm": {"atol": 1e-4}}
ORDER = (None, "a", "b", "a", None, "b")


class Whole(EngineUnderTest):
    """One with the models a and b."""

    limits = AdapterLimits(WHOLE, max_loaded=1)

    def __init__(self, name: str, model_path: Path, root: Path) -> None:
        super().__init__(name, model_path, root)
        self.near = NEAR[name]
        made = {key: whole_state(model_path, seed) for key, seed in (("a", 1), ("b", 2))}
        self.states = {key: state for key, (state, _) in made.items()}
        self.models = {None: model_with(model_path, None), **{key: lm for key, (_, lm) in made.items()}}
        for key, state in self.states.items():
            self.call(self.engine.add_adapter(key, state))

    def sample(self, name: str | None) -> SampleOutput:
        output: SampleOutput = self.call(self.engine.sample(name, CALL))
        return output

    def check(self, name: str | None, output: SampleOutput) -> None:
        for sample in output.samples:
            said = said_of(self.models[name], PROMPT, sample.token_ids, 0.8)
            np.testing.assert_allclose(sample.logprobs, said, **self.near)
            for other in {None, "a", "b"} - {name}:
                wrong = said_of(self.models[other], PROMPT, sample.token_ids, 0.8)
                assert np.abs(sample.logprobs - wrong).max() > 0.02


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=VLLM)])
def served(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "vllm":
        request.getfixturevalue("warm_spawn")
    subject = Whole(request.param, tiny_model, tmp_path_factory.mktemp("whole"))
    yield subject
    subject.close()


def test_each_samples_from_its_own_weights_one_after_the_other(served: Whole) -> None:
    drawn = []
    for name in ORDER:
        output = served.sample(name)
        served.check(name, output)
        drawn.append([sample.token_ids for sample in output.samples])
    assert drawn[0] == drawn[4]
    assert drawn[1] == drawn[3]
    assert drawn[2] == drawn[5]


def test_calls_at_the_same_time_take_turns(served: Whole) -> None:
    async def together() -> list[SampleOutput]:
        return await asyncio.gather(*(served.engine.sample(name, CALL) for name in ORDER))

    for name, output in zip(ORDER, served.call(together()), strict=True):
        served.check(name, output)


def test_dropped_weights_are_unknown(served: Whole) -> None:
    served.call(served.engine.add_adapter("c", served.states["a"]))
    served.sample("c")
    served.call(served.engine.drop_adapter("c"))
    assert served.engine.adapters() == ["a", "b"]
    with pytest.raises(UnknownAdapter, match="'c'"):
        served.sample("c")
    served.check(None, served.sample(None))


def test_weights_of_another_model_are_refused(served: Whole) -> None:
    state = served.states["a"]
    tensors = {**state.tensors, "weights/model.norm.weight": np.zeros(3, np.float32)}
    with pytest.raises(DataError, match=r"model\.norm\.weight is not there or has another shape"):
        served.call(served.engine.add_adapter("d", replace(state, tensors=tensors)))
