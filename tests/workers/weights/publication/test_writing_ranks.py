"""What trainer ranks publish: parameters in shards, buffers whole from one rank, all of them in the engine's dtype."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.workers.trainer.writing import publish
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import open_publication
from penstock.workers.weights.publication.reading import MappedWeights

WEIGHT = torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3
BUFFER = torch.tensor([0.1, 0.2, 0.3])


@dataclass
class Group:
    rank: int
    num_ranks: int = 2

    def barrier(self) -> None:
        """Ranks run one after the other here, rank 0 last: it seals."""


def pieces_of(rank: int) -> Iterator[Piece]:
    """The first rank has four of seven rows and the whole buffer."""
    first = 4 * rank
    yield Piece("embed.weight", (7, 5), 5 * first, WEIGHT[first : first + 4].reshape(-1))
    yield Piece("norm.scale", (3,), 0, BUFFER if rank == 0 else BUFFER[:0])


def publish_of(rank: int, directory: Path, version: int, dtype: str) -> Any:
    layout = compute_layout([("embed.weight", (7, 5), dtype), ("norm.scale", (3,), dtype)])
    return publish(Group(rank), pieces_of(rank), str(directory), version, layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_publish_shards_and_buffers_in_the_engines_dtype(tmp_path: Path, dtype: str) -> None:
    for version in range(1, 5):
        for rank in (1, 0):
            publication = publish_of(rank, tmp_path, version, dtype)
    mapped = MappedWeights(open_publication(publication))
    mapped.verify()
    expected = {"embed.weight": WEIGHT, "norm.scale": BUFFER}
    assert {name for name, _ in mapped.tensors()} == set(expected)
    for name, tensor in mapped.tensors():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype)))
    assert {entry.rank for entry in mapped.manifest.ranges if entry.name == "norm.scale"} == {0}


def test_a_rank_that_did_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="rank 1 of 2 did not finish"):
        publish_of(0, tmp_path, 1, "float32")
