"""Plain data comes back exactly as it was, what is none is refused by its place, and no text can do more than fail."""

import collections
import dataclasses
import json
import math
import pickle
import struct
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.conf.errors import NotPlainData
from penstock.workers.trainer.checkpointing.plain_data import MAX_DEPTH, decode, encode

NUMPY = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes()
ARRAYS = hnp.arrays(NUMPY, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
SCALARS = NUMPY.flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
TORCH = st.sampled_from([torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool])
TENSORS = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype), st.floats(0, 100) | st.lists(st.floats(0, 100)), TORCH
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
LEAVES = KEYS | st.floats() | ARRAYS | SCALARS | TENSORS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=8
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["tuple", "dict", "array", "tensor", "int"]), inner)
    ),
    max_leaves=8,
)


def facts(value: Any) -> Any:
    """All that tells two values apart."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.flatten().view(torch.uint8).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, list | tuple):
        return kind, [facts(item) for item in value]
    if isinstance(value, dict):
        return kind, [(facts(key), facts(item)) for key, item in value.items()]
    return kind, value


@given(VALUES)
def test_what_is_plain_comes_back_as_it_was(value: Any) -> None:
    assert facts(decode(encode(value))) == facts(value)


@pytest.mark.parametrize("power", [64, 20_000])
def test_integers_of_any_length_come_back(power: int) -> None:
    assert decode(encode([2**power, -(2**power)])) == [2**power, -(2**power)]


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_numbers_that_json_has_no_word_for_come_back_as_they_were(value: float) -> None:
    assert facts(decode(encode(value))) == facts(value)


def test_a_view_is_kept_as_its_values_alone() -> None:
    tensor = torch.arange(1_000.0).reshape(10, 100).T[3:5]
    assert torch.equal(decode(encode(tensor)), tensor)
    assert len(encode(tensor)) < 200
    assert decode(encode(np.arange(6.0).reshape(2, 3).T)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_arrays_that_come_back_can_be_written_to() -> None:
    array, tensor = decode(encode((np.zeros(2), torch.zeros(2))))
    array += 1
    tensor += 1
    assert array.tolist() == tensor.tolist() == [1, 1]


class Number(int):
    pass


@dataclasses.dataclass
class Point:
    x: float = 0.0


REFUSED = {
    "a function": (len, r"\['a'\]\[1\] is of type builtin_function_or_method"),
    "a dataclass": (Point(), r"\['a'\]\[1\] is of type .*Point; plain data is None, bool.*Make it one of these"),
    "a subclass of int": (Number(3), "Number"),
    "an OrderedDict": (collections.OrderedDict(), "OrderedDict"),
    "a namedtuple": (collections.namedtuple("Pair", "a b")(1, 2), "Pair"),
    "a set": ({1}, "set"),
    "an array of objects": (np.array([None]), "ndarray of object"),
    "an array of records": (np.zeros(1, [("a", "i4")]), "ndarray of"),
    "an array's subclass": (np.ma.zeros(2), "MaskedArray"),
    "a parameter": (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
    "a sparse tensor": (torch.zeros(2, 2).to_sparse(), r"to_dense\(\)"),
    "a tensor without values": (torch.zeros(1, device="meta"), r"float32 on meta.*\.cpu\(\)"),
    "a tensor of float8": (torch.zeros(1).to(torch.float8_e5m2), "of float8_e5m2"),
    "a tensor with gradient": (torch.zeros(1, requires_grad=True), r"detach\(\)"),
    "a key": ({frozenset(): 1}, r"\['a'\]\[1\]\[frozenset\(\)\] \(the key\) is of type frozenset"),
    "half a character": (chr(0xD800), "UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_plain_is_refused_by_its_place(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(NotPlainData, match=message):
        encode({"a": [0, value]})


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlainData, match="contains itself"):
        encode(endless)


def test_values_as_deep_as_may_be_are_written_and_read() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(NotPlainData, match="deeper than"):
        encode([value])
    with pytest.raises(NotPlainData, match="more than"):
        decode(json.dumps([value]))


@given(st.text() | st.binary() | JSON.map(partial(json.dumps)))
def test_a_text_of_somebody_else_is_a_value_or_one_error(text: str | bytes) -> None:
    try:
        value = decode(text)
    except NotPlainData:
        return
    encode(value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"array": ["O", [1], "AAAAAAAAAAA="]}',
        '{"array": ["<f4", [-1], "AAAAAA=="]}',
        '{"array": ["<f4", [9999999999], "AAAAAA=="]}',
        '{"tensor": ["load", [1], "AAAAAA=="]}',
        '{"tensor": ["qint8", [1], "AA=="]}',
        '{"dict": [[[], 1]]}',
        '{"tuple": [1], "dict": []}',
        "{}",
        pickle.dumps([1, 2]),
    ],
)
def test_a_text_that_no_encoder_writes_is_refused(text: str | bytes) -> None:
    with pytest.raises(NotPlainData):
        decode(text)
