"""The computed layout is, byte for byte, what the safetensors library writes."""

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conf.errors import WeightError
from penstock.workers.weights.publication.layout import DTYPE_BYTES, compute_layout
from tests.amounts import amount

DTYPES = tuple(DTYPE_BYTES)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ENTRIES = st.dictionaries(st.text(min_size=1, max_size=12), st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8)


def entries_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]


@settings(max_examples=amount(150), deadline=None)
@given(ENTRIES)
def test_header_and_offsets_are_those_of_the_library(entries: dict[str, tuple[tuple[int, ...], str]]) -> None:
    entries.pop("__metadata__", None)
    tensors = {
        name: torch.rand(shape, dtype=torch.float64).to(getattr(torch, dtype))
        for name, (shape, dtype) in entries.items()
    }
    expected = safetensors.torch.save(tensors, metadata={"format": "pt"})
    layout = compute_layout(entries_of(tensors))
    assert layout.header == expected[: len(layout.header)]
    assert layout.num_bytes == len(expected)
    for place in layout.tensors:
        data = tensors[place.name].reshape(-1).view(torch.uint8).numpy().tobytes() if place.num_bytes else b""
        assert expected[place.offset : place.offset + place.num_bytes] == data


def test_wide_dtypes_come_first_then_names_in_order() -> None:
    layout = compute_layout([("b", (2, 3), "bfloat16"), ("c", (4,), "float32"), ("a", (1,), "float32")])
    assert [place.name for place in layout.tensors] == ["a", "c", "b"]
    start = len(layout.header)
    assert [place.offset - start for place in layout.tensors] == [0, 4, 20]
    assert layout.num_bytes == start + 4 + 16 + 12
    assert (layout.place("b").num_elements, layout.place("b").num_bytes) == (6, 12)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(WeightError, match="'w' is given twice"):
        compute_layout([("w", (1,), "float32"), ("w", (1,), "float32")])


def test_an_unknown_dtype_is_named_with_the_nearest() -> None:
    with pytest.raises(WeightError, match="did you mean 'bfloat16'"):
        compute_layout([("w", (1,), "bfloat")])


def test_an_unknown_tensor_is_named_with_the_nearest() -> None:
    with pytest.raises(WeightError, match=r"did you mean 'model\.norm\.weight'"):
        compute_layout([("model.norm.weight", (1,), "float32")]).place("model.norm.weigth")
