"""The engine that `trainer.engine` names. DeepSpeed is imported only where it is asked for."""

from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.engines.engine import TrainEngine
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.models.policy_model import PolicyModel
from penstock.workers.trainer.models.scalar_model import ScalarModel
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.trainer.ranks import Ranks


def make_engine(
    model: PolicyModel | ScalarModel, weights: StartingWeights, ranks: Ranks, config: TrainerConfig
) -> TrainEngine:
    """Make `config.engine` around a model, which gets its weights there. Collective."""
    if config.engine == "deepspeed":
        from penstock.workers.trainer.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, weights, ranks, config)
    return FsdpEngine(model, weights, ranks, config)
