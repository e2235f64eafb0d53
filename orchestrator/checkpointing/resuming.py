"""Where a run goes on: its directory, and the checkpoint that it starts from, if any.

    resume=never     a new run
    resume=auto      the run called `name`, from its newest checkpoint; a new run if there is no such run
    resume=PATH      a new run, from that checkpoint (or the newest of that run)

Called by `run.py` before any actor starts.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from penstock.conf.errors import CheckpointError, ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoint, Checkpoints, open_checkpoint
from penstock.orchestrator.checkpointing.saving import checkpoint_place
from penstock.orchestrator.run_directory import RunDirectory
from penstock.workers.files import download, is_url


def open_run(config: RunConfig) -> tuple[RunDirectory, Checkpoint | None]:
    """The run's directory with its first event written, and what it goes on from. Raises `ConfigError`,
    `CheckpointError`."""
    if config.resume == "auto" and _there(config):
        directory = RunDirectory.open(Path(config.output_dir).expanduser() / str(config.name))
        checkpoints = Checkpoints(checkpoint_place(config, directory), config.checkpoint)
        checkpoints.sweep()
        resumed = checkpoints.newest()
        directory = RunDirectory.reopen(config, resumed.step if resumed else -1)
    else:
        resumed = None
        if config.resume not in ("auto", "never"):
            place = config.resume
            resumed = open_checkpoint(place if is_url(place) else str(Path(place).expanduser().resolve()))
        directory = RunDirectory.create(config)
    if resumed is None:
        about = {"recipe": config.recipe, "algorithm": config.algorithm.name, "max_staleness": config.max_staleness}
        directory.event("start", **about)
        return directory, None
    check_fits(resumed, config)
    directory.event("resume", step=resumed.step, path=resumed.directory)
    return directory, _with_local_store(resumed, directory)


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """What must be as it was. The store and the trainers check columns and shapes themselves. Raises `ConfigError`,
    `CheckpointError`."""
    before, now = checkpoint.config.get("algorithm", {}).get("name"), config.algorithm.name
    if before != now:
        raise ConfigError(
            f"algorithm={now}, and {checkpoint.directory} is of {before}. To go on from its weights only, export them: "
            f"penstock export {checkpoint.directory} DIRECTORY, and set model.path=DIRECTORY."
        )
    model = Path(checkpoint.model_path)
    if model.is_absolute() and not model.is_dir():  # else a hub's id
        raise CheckpointError(
            f"{checkpoint.directory} was trained from {model}, which is gone: configuration and tokenizer come from "
            "there. Put it back, or start a new run from another model.path."
        )


def _with_local_store(checkpoint: Checkpoint, directory: RunDirectory) -> Checkpoint:
    """The store's actors read files, so that those behind a URL come into the run's directory."""
    if not is_url(checkpoint.directory):
        return checkpoint
    local = directory.path / "resumed_store"
    shutil.rmtree(local, ignore_errors=True)
    download(checkpoint.store, local)
    return replace(checkpoint, store_directory=str(local))


def _there(config: RunConfig) -> bool:
    return (Path(config.output_dir).expanduser() / str(config.name) / "config.yaml").is_file()
