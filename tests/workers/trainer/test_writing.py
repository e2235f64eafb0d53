from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.algorithms.losses import sft_loss
from penstock.store.data.rows import Rows
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.weights.publication.publication import open_publication
from penstock.workers.weights.publication.reading import MappedWeights
from tests.workers.trainer.conftest import ENGINES
from tests.workers.weights.chain.relays import Cluster

Make = Callable[..., PolicyTrainer]


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
