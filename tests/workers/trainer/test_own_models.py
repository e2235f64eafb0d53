"""Several policies that are whole models, on one rank: each learns as if it was alone, and one publication has all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ModelError
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import OptimizerConfig, PolicyConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.own_models import LeadingTrainer, open_leader, trainers_of
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.publication.publication_files import MappedWeights
from tests.workers.trainer.conftest import assert_same, whole_state

MakeRows = Callable[..., Rows]
OPTIMIZER = OptimizerConfig(lr=1e-2)
CONFIG = TrainerConfig(
    optimizer=OPTIMIZER, policies={"solver": PolicyConfig(), "proposer": PolicyConfig(optimizer={"lr": 3e-2})}
)


@pytest.fixture
def paths(model_path: str, tmp_path: Path) -> dict[str, str]:
    fresh = FreshModelConfig(num_layers=1, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1)
    build_fresh_model(tmp_path / "smaller", fresh, seed=4)
    return {"solver": model_path, "proposer": str(tmp_path / "smaller")}


@pytest.fixture
def open_all(paths: dict[str, str]) -> Iterator[Callable[[], LeadingTrainer]]:
    made: list[LeadingTrainer] = []

    def open_both() -> LeadingTrainer:
        made.append(open_leader(CONFIG, paths, lambda: Ranks.join(CONFIG)))
        return made[-1]

    yield open_both
    for one in reversed(made):
        one.close()


def trained(leader: LeadingTrainer, make_rows: MakeRows) -> LeadingTrainer:
    """Three updates of the solver, and one of the proposer."""
    for seed in range(3):
        with leader.using("solver") as trainer:
            trainer.update(make_rows(4, seed=seed), sft_loss)
    with leader.using("proposer") as trainer:
        trainer.update(make_rows(4, seed=9), sft_loss)
    return leader


def states(leader: LeadingTrainer) -> dict[str, Any]:
    return {name: (whole_state(one), one.counters) for name, one in trainers_of(leader).items()}


def test_each_model_learns_as_if_it_was_alone(
    open_all: Callable[[], LeadingTrainer], paths: dict[str, str], make_trainer: Any, make_rows: MakeRows
) -> None:
    leader = trained(open_all(), make_rows)
    solver, proposer = make_trainer(paths["solver"], lr=1e-2), make_trainer(paths["proposer"], lr=3e-2)
    for seed in range(3):
        solver.update(make_rows(4, seed=seed), sft_loss)
    proposer.update(make_rows(4, seed=9), sft_loss)
    assert list(trainers_of(leader)) == ["solver", "proposer"]
    for name, alone in {"solver": solver, "proposer": proposer}.items():
        assert_same(whole_state(leader.trainers[name]), whole_state(alone))
        assert leader.trainers[name].counters["counters"].tolist() == alone.counters["counters"].tolist()


def test_one_publication_has_all_models_and_each_engine_finds_its_own(
    open_all: Callable[[], LeadingTrainer], make_rows: MakeRows, tmp_path: Path
) -> None:
    leader = trained(open_all(), make_rows)
    publication = leader.publish(str(tmp_path / "weights"), 1)
    written = leader.export(str(tmp_path / "model"))
    assert set(written) == {"solver/model.safetensors", "proposer/model.safetensors"}
    names = {name for name, _ in MappedWeights(publication).tensors()}
    for policy in ("solver", "proposer"):
        mapped = MappedWeights(publication, f"{policy}/")
        assert_same(dict(mapped.tensors()), load_file(tmp_path / "model" / policy / "model.safetensors"))
        names -= {f"{policy}/{name}" for name in mapped.places}
    assert names == set()


def test_a_state_of_all_models_is_gone_on_from(
    open_all: Callable[[], LeadingTrainer], make_rows: MakeRows, tmp_path: Path
) -> None:
    leader, other = trained(open_all(), make_rows), open_all()
    saving = TrainingState(trainers_of(leader))
    assert saving.begin(str(tmp_path / "state"))
    files = saving.finish()
    assert leader.hash_of_weights() != other.hash_of_weights()
    TrainingState(trainers_of(other)).load(str(tmp_path / "state"), files)
    assert leader.hash_of_weights() == other.hash_of_weights()
    for name, (state, counters) in states(leader).items():
        found, own_counters = states(other)[name]
        assert_same(found, state)
        assert torch.equal(own_counters["counters"], counters["counters"])
    with other.using("proposer") as trainer:
        assert trainer.num_updates == 1


def test_one_model_that_cannot_be_loaded_leaves_nothing_open(paths: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        open_leader(CONFIG, paths | {"proposer": "nowhere"}, lambda: Ranks.join(CONFIG))
    assert not torch.distributed.is_initialized()
    open_leader(CONFIG, paths, lambda: Ranks.join(CONFIG)).close()
    assert not torch.distributed.is_initialized()
