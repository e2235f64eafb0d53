"""Publications of trainer ranks: parameters in shards and in the engines' dtype, buffers whole from one rank and in
their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import WeightError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.publishing import Publisher
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.reading import MappedWeights, open_publication
from tests.workers.trainer.conftest import ENGINES
from tests.workers.weights.chain.relays import Cluster

Make = Callable[..., PolicyTrainer]
WEIGHT = torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3
BUFFER = torch.tensor([0.1, 0.2, 0.3])
COUNTS = torch.tensor([2**40, 3])


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_publication_is_the_state_dict_in_the_engines_dtype_less_tied_weights(
    make_trainer: Make, model_path: str, tmp_path: Path, dtype: str
) -> None:
    publication = make_trainer(engine_dtype=dtype).publish(str(tmp_path), 3)
    assert publication.version == 3
    assert publication.directory == str(tmp_path / "v00000003")
    open_publication(publication)
    published = load_file(tmp_path / "v00000003" / "model.safetensors")
    original = load_file(Path(model_path) / "model.safetensors")
    assert published.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(published[name], tensor.to(getattr(torch, dtype))), name


def test_a_publication_for_other_nodes_arrives_there_as_it_would_be_here(
    make_trainer: Make, make_rows: Callable[..., Rows], tmp_path: Path
) -> None:
    trainer = make_trainer(lr=1e-2, engine_dtype="bfloat16")
    trainer.publish(str(tmp_path / "here"), 1)
    plan = trainer.plan_chunks("x", num_receivers=1)
    with Cluster(tmp_path, plan, ["a"]) as cluster:
        for version in (1, 2):
            cluster.begin(version)
            trainer.publish(str(cluster.roots["x"]), version)
            publication = cluster.relays["a"].wait(version, 60)
            MappedWeights(open_publication(publication)).verify()
            if version == 1:
                files = [Path(root) / "v00000001" / "model.safetensors" for root in (tmp_path / "here", tmp_path / "a")]
                assert files[0].read_bytes() == files[1].read_bytes()
                trainer.update(make_rows(4), sft_loss)


def test_what_is_published_after_an_update_is_what_was_trained(
    make_trainer: Make, make_rows: Callable[..., Rows], tmp_path: Path
) -> None:
    trainer = make_trainer(lr=1e-2)
    trainer.publish(str(tmp_path), 0)
    trainer.update(make_rows(4), sft_loss)
    trainer.publish(str(tmp_path), 1)
    first, second = (load_file(tmp_path / f"v0000000{version}" / "model.safetensors") for version in (0, 1))
    assert all(not torch.equal(first[name], second[name]) for name in first)


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
    yield Piece("norm.scale", (3,), 0, BUFFER if rank == 0 else BUFFER[:0], keeps_dtype=True)
    yield Piece("norm.count", (2,), 0, COUNTS if rank == 0 else COUNTS[:0], keeps_dtype=True)


def publish_of(rank: int, directory: Path, version: int, dtype: str) -> Any:
    publisher = Publisher(Group(rank), lambda: pieces_of(rank), dtype)  # type: ignore[arg-type]
    return publisher.publish(str(directory), version)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_publish_shards_in_the_engines_dtype_and_buffers_in_their_own(tmp_path: Path, dtype: str) -> None:
    for version in range(1, 5):
        for rank in (1, 0):
            publication = publish_of(rank, tmp_path, version, dtype)
    mapped = MappedWeights(open_publication(publication))
    mapped.verify()
    expected = {"embed.weight": WEIGHT.to(getattr(torch, dtype)), "norm.scale": BUFFER, "norm.count": COUNTS}
    assert {name for name, _ in mapped.tensors()} == set(expected)
    for name, tensor in mapped.tensors():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    assert {entry.rank for entry in mapped.manifest.ranges if entry.name == "norm.scale"} == {0}


def test_a_rank_that_did_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="rank 1 of 2 did not finish"):
        publish_of(0, tmp_path, 1, "float32")
