"""`penstock export CHECKPOINT DIRECTORY`: a checkpoint's weights as a HF model directory. Needs neither Ray nor
the run.

The model is made as the run made it (base weights, adapters, head), the trained weights are read into it, and it is
written as `tracking.export_model` writes it at the end of a run.
"""

from pathlib import Path

from omegaconf import OmegaConf

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.checkpoint import Checkpoint
from penstock.orchestrator.checkpointing.checkpoints import open_checkpoint
from penstock.workers.files import absolute
from penstock.workers.trainer.scalar import ScalarTrainer
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState


def export_checkpoint(place: str, directory: str | Path, dtype: str = "") -> Path:
    """Write the model of a checkpoint (or of a run's newest) to `directory`, which must be empty or not there.

    `dtype`: float32 or bfloat16; empty: the run's own. Raises `CheckpointError`, `ConfigError`, `ModelError`.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{directory} is there and not empty. Give the name of a new directory.")
    checkpoint = open_checkpoint(absolute(place))
    trainer = open_trainer(checkpoint, dtype)
    try:
        TrainingState({"policy": trainer}).load(checkpoint.trainer, checkpoint.files)
        trainer.export(str(target))
    finally:
        trainer.close()
    return target


def open_trainer(checkpoint: Checkpoint, dtype: str = "") -> PolicyTrainer:
    """A single rank, as the run's were made."""
    sections = checkpoint.config
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerConfig), sections["trainer"]))
    assert isinstance(config, TrainerConfig)
    return (ScalarTrainer if checkpoint.head == "scores" else PolicyTrainer)(
        config.alone(),
        checkpoint.model_path,
        attention=str(sections["model"]["attention"]),
        engine_dtype=dtype or str(sections["rollout"]["dtype"]),
    )
