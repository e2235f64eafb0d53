"""Models that a checkpoint names, on the machine that goes on from it.

A model that was made for a run with a URL as output_dir (a fresh one, a warm start's) lies in the run's working copy,
which is elsewhere on another machine: a checkpoint names it by its URL.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.conf.errors import CheckpointError
from penstock.network.names import OutsideName, below
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.mirrored import MirrorRecord, url_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.files import download, is_url
from penstock.workers.whole_files import replacing


def as_told(path: str, directory: RunDirectory) -> str:
    """A model's path as other machines know it."""
    return path if directory.url is None or not Path(path).is_absolute() else url_of(Path(path)) or path


def as_here(model: str, directory: RunDirectory) -> str:
    """A model's path in this run, where it is or is to be, by its name in a checkpoint. Raises `CheckpointError`."""
    if not is_url(model):
        return model
    copy = MirrorRecord.above(directory.path)
    root, url = (directory.path, directory.url) if copy is None else (copy[0], copy[1].url)
    if url is not None and model.startswith(f"{url}/"):
        try:
            return str(below(root, model.removeprefix(f"{url}/")))
        except OutsideName as error:
            raise CheckpointError(f"{url}: a checkpoint says that its model is at {model}. {error}") from None
    return str(directory.path / "resumed_models" / hashlib.sha256(model.encode()).hexdigest()[:8])


def with_local_models(checkpoint: Checkpoint, directory: RunDirectory) -> Checkpoint:
    """The checkpoint with paths of this run; another run's models are brought into its directory. Raises
    `CheckpointError`."""

    def brought(model: str) -> str:
        path = as_here(model, directory)
        if is_url(model) and "resumed_models" in Path(path).parts:
            bring_model(model, Path(path))
        return path

    return with_models(checkpoint, brought)


def bring_model(url: str, directory: Path) -> None:
    """Download a model, unless it is there. Raises `CheckpointError`."""
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with replacing(directory) as part:
            download(url, part)


def with_models(checkpoint: Checkpoint, place_of: Callable[[str], str]) -> Checkpoint:
    others = {name: place_of(model) for name, model in checkpoint.model_paths.items()}
    return replace(checkpoint, model_path=place_of(checkpoint.model_path), model_paths=others)
