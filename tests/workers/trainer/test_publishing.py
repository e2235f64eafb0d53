"""Publications of trainer ranks: parameters in shards and in the engines' dtype, buffers whole from one rank and in
their own."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import DeadlineExceeded, NotStarted, WeightError
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Publication
from penstock.workers.trainer import publishing
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.publishing import Publisher
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.publication_files import MappedWeights, open_publication
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
            MappedWeights(publication).verify()
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
    device, timeout = torch.device("cpu"), timedelta(seconds=600)

    def group_beside(self) -> None:
        """None: ranks run one after the other here, rank 0 last: it seals."""

    def barrier(self, group: None) -> None: ...


def pieces_of(rank: int) -> Iterator[Piece]:
    """The first rank has four of seven rows and the whole buffer."""
    first = 4 * rank
    yield Piece("embed.weight", (7, 5), 5 * first, WEIGHT[first : first + 4].reshape(-1))
    yield Piece("norm.scale", (3,), 0, BUFFER if rank == 0 else BUFFER[:0], keeps_dtype=True)
    yield Piece("norm.count", (2,), 0, COUNTS if rank == 0 else COUNTS[:0], keeps_dtype=True)


def publish_of(rank: int, directory: Path, version: int, dtype: str) -> Any:
    publisher = Publisher(Group(rank), lambda: pieces_of(rank), dtype)  # type: ignore[arg-type]
    publisher.begin(str(directory), version)
    return publisher.finish(version, 600)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_publish_shards_in_the_engines_dtype_and_buffers_in_their_own(tmp_path: Path, dtype: str) -> None:
    for version in range(1, 5):
        for rank in (1, 0):
            publication = publish_of(rank, tmp_path, version, dtype)
    mapped = MappedWeights(publication)
    mapped.verify()
    expected = {"embed.weight": WEIGHT.to(getattr(torch, dtype)), "norm.scale": BUFFER, "norm.count": COUNTS}
    assert {name for name, _ in mapped.tensors()} == set(expected)
    for name, tensor in mapped.tensors():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    assert {entry.rank for entry in mapped.manifest.ranges if entry.name == "norm.scale"} == {0}


class HeldUp:
    """A writer that does not begin before `may_write`, or fails then. Values count as a device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.may_write = threading.Event()
        writer = publishing.PublicationWriter

        def held_up(*arguments: Any) -> Any:
            assert self.may_write.wait(600)
            if error is not None:
                raise error
            return writer(*arguments)

        monkeypatch.setattr(publishing, "needs_buffers", lambda values: True)
        monkeypatch.setattr(publishing, "PublicationWriter", held_up)


def test_what_is_on_a_device_is_published_as_it_was_when_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up, values = HeldUp(monkeypatch), torch.arange(6.0)
    pieces = [Piece("w", (2, 3), 0, values)]
    publisher = Publisher(Group(0, 1), lambda: pieces, "float32")  # type: ignore[arg-type]
    assert publisher.seconds_under_way is None
    publisher.begin(str(tmp_path), 1)
    values += 10
    assert publisher.seconds_under_way is not None
    with pytest.raises(DeadlineExceeded, match=r"rank 0 did not end it within 0 s\. Raise weights\.phase_timeout_s"):
        publisher.finish(1, 0)
    assert not list(tmp_path.glob("*/manifest.json"))
    held_up.may_write.set()
    publisher.begin(str(tmp_path), 2)  # waits for the one before
    published = [publisher.finish(2, 600), Publication(str(tmp_path / "v00000001"), 1)]
    later, begun = (dict(MappedWeights(one).tensors())["w"].flatten().tolist() for one in published)
    assert (begun, later) == ([0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15])
    assert publisher.finish(2, 0) == published[0]
    assert publisher.seconds_under_way is None
    with pytest.raises(NotStarted, match="version 1 was not begun by rank 0"):
        publisher.finish(1, 0)


def test_what_fails_meanwhile_is_raised_to_whoever_waits_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up = HeldUp(monkeypatch, WeightError("no room"))
    publisher = Publisher(Group(0, 1), lambda: [Piece("w", (6,), 0, torch.arange(6.0))], "float32")  # type: ignore[arg-type]
    held_up.may_write.set()
    publisher.begin(str(tmp_path), 1)
    for _ in range(2):
        with pytest.raises(WeightError, match="no room"):
            publisher.finish(1, 600)
    monkeypatch.undo()
    publisher.begin(str(tmp_path), 2)
    assert publisher.finish(2, 600).version == 2


def test_a_rank_that_did_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="rank 1 of 2 did not finish"):
        publish_of(0, tmp_path, 1, "float32")
