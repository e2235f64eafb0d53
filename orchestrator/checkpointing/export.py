"""Models as HF directories: the trainer's during a run, wherever its ranks are, and a checkpoint's by `penstock export
CHECKPOINT DIRECTORY` (with --best: a run's best one), which needs neither Ray nor the run.

The model of a checkpoint is made as the run made it (base weights, adapters, head), the trained weights are read into
it, and it is written as `tracking.export_model` writes it at the end of a run. Only this needs the trainer's code, so
that is imported late.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from penstock.conf.errors import ConfigError, WeightError
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.checkpointing.checkpoints import best_checkpoint, bring_model, open_checkpoint
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answers
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.workers.models.model_files import check_exported, remove_weights
from penstock.workers.protocols import Publication
from penstock.workers.runtime.local_files import staged_directory
from penstock.workers.runtime.url_files import absolute, is_url, list_names, upload_directory

if TYPE_CHECKING:
    from penstock.workers.trainer.policy_trainer import PolicyTrainer


async def export_model(fleet: Fleet, directory: str) -> None:
    """Export the trainer's model to the driver's machine, whole or not at all. Raises `DeadlineExceeded`, `WorkerDied`,
    `ResourceError`, `WeightError`, `CheckpointError`."""
    try:
        with staged_directory(Path(directory)) as part:
            places = await fleet.places(str(part))
            calls = [(name, handle.export.remote(places[name])) for name, handle in fleet.role("trainer")]
            written = await answers(calls, phase="export", timeout_s=fleet.config.trainer.collective_timeout_s)
            await fleet.collect(str(part), places)
            await asyncio.to_thread(check_exported, str(part), written)
        remove_weights(Path(directory), [name for own in written for name in own])
    except OSError as error:  # of this machine: an actor's is an error of Ray's
        raise WeightError(
            f"export to {directory}: cannot be written: {error}. Make room there, or see whether its file system "
            "answers. A checkpoint has the weights too: penstock export CHECKPOINT DIRECTORY."
        ) from None


def replace_model(place: str, directory: Path) -> None:
    """Write the model of a checkpoint in place of what is in the directory. Raises as `export_checkpoint` does."""
    with staged_directory(directory) as part:
        export_checkpoint(place, part)


def export_best(run: str, directory: str | Path, dtype: str = "", tell: Callable[[str], None] = print) -> str:
    """Write the model of a run's best checkpoint, by its `checkpoint.best_metric`. Arguments, result and errors are
    those of `export_checkpoint`. `tell`: called with the step and its score."""
    checkpoint, told = best_checkpoint(absolute(run))
    tell(told)
    return export_checkpoint(checkpoint.directory, directory, dtype)


def export_checkpoint(place: str, directory: str | Path, dtype: str = "") -> str:
    """Write the model of a checkpoint (or of a run's newest) to `directory`, which must be empty or not there, and may
    be a URL. Returns it.

    `dtype`: float32 or bfloat16; empty: the run's own. Raises `CheckpointError`, `ConfigError`, `ModelError`.
    """
    target = absolute(str(directory))
    if list_names(target) or Path(target).is_file():
        raise ConfigError(f"{directory} is there and not empty. Give the name of a new directory.")
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        written = Path(f"{folder}/model" if is_url(target) else target)
        with _trainer_of(place, dtype) as trainer, staged_directory(written) as part:
            trainer.export(str(part))
        if is_url(target):
            upload_directory(written, target)
    return str(directory)


def publish_checkpoint(place: str, root: str, version: int) -> Publication:
    """Write the weights of a checkpoint below `root` as the run has published them. Raises `CheckpointError`,
    `ModelError`, `WeightError`."""
    with _trainer_of(place) as trainer:
        return trainer.publish(root, version)


@contextlib.contextmanager
def _trainer_of(place: str, dtype: str = "") -> "Iterator[PolicyTrainer]":
    """A trainer of a single rank in the state of a checkpoint."""
    from penstock.workers.trainer.own_models import trainers_of
    from penstock.workers.trainer.training_state import TrainingState

    checkpoint = open_checkpoint(absolute(place))
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        trainer = open_trainer(checkpoint, dtype, partial(_brought, folder))
        try:
            TrainingState(trainers_of(trainer)).load(checkpoint.trainer, checkpoint.files)
            yield trainer
        finally:
            trainer.close()


def _brought(folder: str, model: str) -> str:
    """The path of a model, which comes to a folder where it is a URL."""
    if not is_url(model):
        return model
    bring_model(model, place := Path(folder, model.replace("/", "-")))
    return str(place)


def open_trainer(checkpoint: Checkpoint, dtype: str = "", local: Callable[[str], str] = str) -> "PolicyTrainer":
    """A trainer of a single rank, made as the run's ranks were. `local`: returns the local path of a model."""
    from penstock.workers.trainer.own_models import open_leader
    from penstock.workers.trainer.policy_trainer import PolicyTrainer
    from penstock.workers.trainer.ranks import Ranks
    from penstock.workers.trainer.scalar import ScalarTrainer

    sections, path = checkpoint.config, checkpoint.model_path
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerConfig), sections["trainer"]))
    assert isinstance(config, TrainerConfig)
    alone = config.alone()
    options: dict[str, Any] = {
        "attention": str(sections["model"]["attention"]),
        "engine_dtype": dtype or str(sections["rollout"]["dtype"]),
    }
    if own := {name: local(checkpoint.model_paths.get(name, path)) for name in config.own_models}:
        return open_leader(alone, own, lambda: Ranks.join(alone), **options)
    return (ScalarTrainer if checkpoint.head == "scores" else PolicyTrainer)(alone, local(path), **options)
