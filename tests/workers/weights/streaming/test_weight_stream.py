"""Whole tensors from the ranks' pieces: the same on every rank, in the engines' dtype, one at a time."""

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.weight_senders import SendingRank, WeightStream
from tests.rank_processes import run_ranks
from tests.workers.weights.streaming import gathering


def alone(pieces: Any, dtype: str = "bfloat16") -> WeightStream:
    rank = SendingRank(0, 1, torch.device("cpu"), pieces, lambda value: [value], torch.nn.Module(), dtype)
    return WeightStream(rank)


def piece(name: str, *shape: int) -> Piece:
    values = torch.arange(math.prod(shape), dtype=torch.float32)
    return Piece(name, shape, 0, values)


def test_one_rank_has_whole_tensors_and_only_casts_them() -> None:
    bias = torch.tensor([0.1, 0.2])
    own = [piece("a", 2, 3), Piece("n", (2,), 0, torch.tensor([4, 5])), Piece("bias", (2,), 0, bias, keeps_dtype=True)]
    stream = alone(lambda: own)
    metas = [(meta.name, meta.dtype, meta.shape, meta.num_bytes) for meta in stream.metadata()]
    assert metas == [("a", torch.bfloat16, (2, 3), 12), ("n", torch.int64, (2,), 16), ("bias", torch.float32, (2,), 8)]
    tensors = dict(stream)
    assert torch.equal(tensors["bias"], bias)
    assert torch.equal(tensors["a"], torch.tensor([[0.0, 1, 2], [3, 4, 5]], dtype=torch.bfloat16))
    assert torch.equal(tensors["n"], torch.tensor([4, 5]))


def test_a_pass_holds_no_tensor_but_the_one_that_was_taken() -> None:
    stream = alone(lambda: iter([piece(name, 4) for name in "abcd"]))
    alive = []
    for _, tensor in stream:
        alive.append(weakref.ref(tensor))
        del tensor
        assert sum(reference() is not None for reference in alive) <= 1


def test_a_stream_says_how_far_it_is() -> None:
    stream = alone(lambda: [piece("a", 1), piece("b", 1)])
    taken = iter(stream)
    next(taken), next(taken)
    assert stream.position == "1 of 2 tensors taken, at 'b'"
    assert next(taken, None) is None
    assert stream.position == "2 of 2 tensors taken, past the last"


def test_a_trainer_that_changes_the_order_of_its_weights_is_refused() -> None:
    orders = iter(["ab", "ba"])
    stream = alone(lambda: [piece(name, 1) for name in next(orders)])
    with pytest.raises(WeightError, match="'b' instead of 'a'"):
        list(stream)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    """The directory of what two processes wrote."""
    pytest.importorskip("vllm", reason="vLLM is not installed: its sender is not tested")
    directory = tmp_path_factory.mktemp("two")
    run_ranks([*warm_python, "-m", gathering.__name__], 2, directory, timeout_s=900)
    return directory


@pytest.mark.real
@pytest.mark.parametrize("file", ["gathered.0.pt", "gathered.1.pt", "sent.0.pt"])
def test_two_ranks_gather_what_one_has(two: Path, file: str) -> None:
    """`sent`: while the other rank joins in through vLLM's sender for ranks that do not send."""
    gathered = torch.load(two / file)
    assert list(gathered) == list(gathering.SHAPES)
    for name, tensor in gathered.items():
        expected = gathering.full(name)
        expected = expected if name == "steps" else expected.to(torch.bfloat16)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
