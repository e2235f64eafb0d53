"""What trainer ranks publish: parameters in shards, buffers whole from one rank, all of them in the engine's dtype."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.workers.trainer.writing import publish
from penstock.workers.weights.publication import open_publication
from penstock.workers.weights.reading import MappedWeights

WEIGHT = torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3
BUFFER = torch.tensor([0.1, 0.2, 0.3])


@dataclass
class Group:
    rank: int
    num_ranks: int = 2

    def barrier(self) -> None:
        """Ranks run one after the other here, rank 0 last: it seals."""


@dataclass
class Policy:
    """Plays `ShardedPolicy`: the first rank has four of seven rows and the whole buffer."""

    group: Group

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], int, torch.Tensor]]:
        first = 4 * self.group.rank
        yield "embed.weight", (7, 5), first, WEIGHT[first : first + 4]
        yield "norm.scale", (3,), 0, BUFFER if self.group.rank == 0 else BUFFER[:0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_publish_shards_and_buffers_in_the_engines_dtype(tmp_path: Path, dtype: str) -> None:
    for version in range(1, 5):
        for rank in (1, 0):
            publication = publish(Policy(Group(rank)), str(tmp_path), version, dtype)  # type: ignore[arg-type]
    mapped = MappedWeights(open_publication(publication))
    mapped.verify()
    expected = {"embed.weight": WEIGHT, "norm.scale": BUFFER}
    assert {name for name, _ in mapped.tensors()} == set(expected)
    for name, tensor in mapped.tensors():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype)))
    assert {entry.rank for entry in mapped.manifest.ranges if entry.name == "norm.scale"} == {0}


def test_a_rank_that_did_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="rank 1 of 2 did not finish"):
        publish(Policy(Group(0)), str(tmp_path), 1, "float32")  # type: ignore[arg-type]
