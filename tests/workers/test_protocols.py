"""A sampling distribution that no engine can draw from is refused where it is made."""

import math
import pickle
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError, SamplingError
from penstock.conf.rollout import LARGEST_TOP_K, LOWEST_TEMPERATURE
from penstock.workers.protocols import Sampling

WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", LOWEST_TEMPERATURE / 2),
    ("temperature", math.nan),
    ("temperature", True),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", -math.inf),
    ("min_p", -0.1),
    ("min_p", 2),
    ("top_k", -1),
    ("top_k", 10**30),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("stop", ("",)),
    ("stop", ("\ud800",)),
    ("stop", (5,)),
    ("stop", "text"),
    ("stop", tuple(map(str, range(1000)))),
    ("structure", {}),
    ("structure", "json"),
    ("structure", {"nonsense": 1}),
    ("structure", {"regex": "a", "choice": ["a"]}),
    ("structure", {"regex": "\udfff"}),
    ("structure", {"json": {"enum": {1, 2}}}),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_no_engine_can_take_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=rf"^{name}=") as error:
        replace(Sampling(), **{name: value})
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, DataError)
    assert error.value.field == name
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_the_lowest_temperature_is_vllms_own_and_greedy_is_beside_it() -> None:
    """vLLM samples at it where it is asked for a lower one, and the trainer would compute at that."""
    assert [Sampling(temperature=value).temperature for value in (0, LOWEST_TEMPERATURE)] == [0.0, 0.01]


def test_numbers_of_other_kinds_become_pythons_own() -> None:
    sampling = Sampling(temperature=np.float32(0.5), top_p=1, top_k=np.int64(3), max_tokens=np.int32(7))  # type: ignore[arg-type]
    assert (type(sampling.temperature), type(sampling.top_p), type(sampling.top_k), type(sampling.max_tokens)) == (
        float, float, int, int,
    )  # fmt: skip


@pytest.mark.real
@given(
    st.floats(0, 2), st.floats(0, 1, exclude_min=True), st.integers(0, LARGEST_TOP_K), st.floats(0, 1),
    st.lists(st.text(min_size=1)), st.one_of(st.none(), st.integers(0, 2**48 - 1)),
)  # fmt: skip
def test_what_is_accepted_reaches_vllms_engine(
    temperature: float, top_p: float, top_k: int, min_p: float, stop: list[str], seed: int | None
) -> None:
    from penstock.workers.rollout.engine_vllm import sampling_params

    try:
        sampling = Sampling(temperature, top_p, top_k, min_p, stop=tuple(stop), seed=seed)
    except SamplingError:
        return
    parameters = sampling_params(1, sampling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parameters), type=type(parameters)).top_k in (0, top_k)
    assert np.array([parameters.top_k], dtype=np.int32)[0] == parameters.top_k
