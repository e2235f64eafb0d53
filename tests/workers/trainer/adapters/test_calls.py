"""The calls of a rank's actor that train adapters, without Ray."""

from collections.abc import Iterator

import pytest

from penstock.algorithms.graph.stage import TrainedPolicy
from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import DataError, NotStarted
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import AdamParams, AdapterSpec, LossCall
from penstock.workers.trainer.rank_spec import TrainerSpec
from penstock.workers.trainer.trainer_actor import Trainer
from tests.workers.trainer.adapters.conftest import assert_equal, data_of

LOSS = LossCall("cross_entropy")


@pytest.fixture(params=[None, 4])
def rank(request: pytest.FixtureRequest, model_path: str) -> Iterator[Trainer]:
    """A rank with a slot of rank 4, or without one."""
    spec = TrainerSpec(
        name="Trainer-policy-0",
        config=TrainerConfig(num_minibatches=3),
        model_path=model_path,
        stage="train",
        policies=(TrainedPolicy("policy", sft_loss),),
        slot_rank=request.param,
    )
    trainer = Trainer(spec)
    trainer.start(None)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("rank", [4], indirect=True)
def test_a_rank_trains_adapters_by_name(rank: Trainer) -> None:
    rank.create_adapter("a", AdapterSpec(rank=2))
    data = data_of(0)
    first = rank.forward_adapter("a", data, LOSS, True)
    assert rank.step_adapter("a", AdamParams(learning_rate=1e-2))["grad_norm"] > 0
    assert rank.forward_adapter("a", data, LOSS, False).metrics["loss"] < first.metrics["loss"]
    state = rank.adapter_state("a")
    rank.drop_adapter("a")
    with pytest.raises(DataError, match="no adapter 'a'"):
        rank.adapter_state("a")
    rank.create_adapter("again", AdapterSpec(rank=2), state)
    assert_equal(rank.adapter_state("again"), state)


@pytest.mark.parametrize("rank", [None], indirect=True)
def test_a_rank_without_a_slot_says_so(rank: Trainer) -> None:
    with pytest.raises(NotStarted, match="no slot for adapters"):
        rank.create_adapter("a", AdapterSpec(rank=2))
