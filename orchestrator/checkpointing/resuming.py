"""The start of a run: its directory, and the checkpoint that it goes on from, if any.

    resume=never     a new run
    resume=auto      the run called `name`: with the actors that live on, where the command that drove it has died
                     (`membership/`); else from its newest checkpoint; a new run if there is no such run
    resume=PATH      a new run, from that checkpoint (or the newest of that run)

This happens before any actor starts. The directory is locked before anything in it is touched, and so is
checkpoint.directory if it is a local one: another process may still write there.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.conf.errors import CheckpointError, ConfigError, DamagedCheckpoint, PenstockError, is_refusal
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, open_checkpoint, with_local_models
from penstock.orchestrator.checkpointing.saving import checkpoint_place
from penstock.orchestrator.membership.takeover import LeftBehind
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.fetching import bring_here
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import ENDS, STARTS
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.store.errors import CorruptSnapshot
from penstock.store.service.snapshot import check as check_snapshot
from penstock.workers.machine.files import absolute, download, exists, is_url
from penstock.workers.prompts.opening import open_rows
from penstock.workers.prompts.source import PromptStart


def open_run(
    config: RunConfig, find_left: Callable[[RunDirectory], LeftBehind | None] = lambda directory: None
) -> tuple[RunDirectory, Checkpoint | LeftBehind | None]:
    """The run's directory, locked, with its first event written, and what it goes on from. `find_left`: returns what a
    command that has died has left of it. What does not fit is told before anything is made or changed. Raises
    `ConfigError`, `CheckpointError`, `RunInUse`, and what `find_left` raises."""
    if config.resume == "auto" and _there(config):
        place = RunPlace.of_run(config)
        directory = RunDirectory.open(place.path, place.url)
        directory.lock(directory.path, f"name={config.name}")
        return _opened(directory, config, lambda: find_left(directory) or _rewound(directory, config))
    if config.resume not in ("auto", "never"):
        resumed = open_checkpoint(absolute(config.resume))
        check_fits(resumed, config)
        change = DataChange.of(resumed, config)
        directory = RunDirectory.create(config)
        return _opened(directory, config, lambda: change.applied(directory))
    return _opened(RunDirectory.create(config), config, lambda: None)


def _opened(
    directory: RunDirectory, config: RunConfig, choose: Callable[[], Checkpoint | LeftBehind | None]
) -> tuple[RunDirectory, Checkpoint | LeftBehind | None]:
    try:
        if config.checkpoint.directory is not None and not is_url(config.checkpoint.directory):
            with contextlib.suppress(ConfigError):  # one that cannot be made is told by its first checkpoint
                directory.lock(Path(checkpoint_place(config, directory)), "checkpoint.directory")
        resumed = choose()
        directory.mirror(config.tracking)
        if resumed is None:
            about = {"recipe": config.recipe, "algorithm": config.algorithm.name, "max_staleness": config.max_staleness}
            directory.event("start", **about)
            return directory, None
        if isinstance(resumed, LeftBehind):
            directory.rewind(config)
            step = max((int(line.get("step", 0)) for line in directory.read_metrics()), default=0)
            silent_s = round(resumed.silent_s, 3)
            directory.event("taken_over", step=step, epoch=resumed.owner.epoch, silent_s=silent_s)
            return directory, resumed
        directory.event("resume", step=resumed.step, path=resumed.directory)
        return directory, _with_local_files(resumed, directory)
    except BaseException as error:
        if is_refusal(error) and directory.is_unused:
            directory.discard()
        directory.close()
        raise


def newest(directory: RunDirectory, config: RunConfig) -> Checkpoint | None:
    """The newest checkpoint of the run that is complete and whole."""
    return Checkpoints(checkpoint_place(config, directory), config.checkpoint).newest()


def rewind(directory: RunDirectory, config: RunConfig) -> Checkpoint | None:
    """Set a run that this process drives back to its newest checkpoint that is whole; None: to its beginning. No
    process writes there any more. Raises `CheckpointError`, `ConfigError`."""
    resumed = _rewound(directory, config)
    return _with_local_files(resumed, directory) if resumed is not None else None


def damage_of(resumed: Checkpoint, failure: PenstockError, starts_from_it: bool) -> PenstockError | None:
    """The damage of a checkpoint that actors have failed of; None: of something else. `starts_from_it`: the store read
    it, too. Actors that were taken over did not, and it may have been removed since."""
    if isinstance(failure, DamagedCheckpoint):
        return failure
    try:
        if starts_from_it:
            check_snapshot(resumed.store)  # a store that cannot read it dies of that, as of anything else
    except CorruptSnapshot as error:
        return error
    return None


def fall_back(
    directory: RunDirectory, config: RunConfig, damaged: Checkpoint, error: PenstockError
) -> Checkpoint | None:
    """Set the run back to the checkpoint before one that its actors have found damaged, which is put aside. None: the
    checkpoint is another run's, or there is none before it. Raises as `rewind` does."""
    checkpoints = Checkpoints(checkpoint_place(config, directory), config.checkpoint)
    if damaged.directory != checkpoints.directory(damaged.step) or checkpoints.steps()[:1] == [damaged.step]:
        return None
    _put_aside(checkpoints, damaged.step, error, directory)
    return rewind(directory, config)


def _put_aside(checkpoints: Checkpoints, step: int, error: PenstockError, directory: RunDirectory) -> None:
    aside = checkpoints.put_aside(step)
    directory.event("checkpoint_damaged", step=step, path=aside, message=str(error))
    directory.failed_writes.tell(
        f"the checkpoint of step {step} is damaged and was put aside as {aside}; the one before is taken: {error}"
    )


def _rewound(directory: RunDirectory, config: RunConfig) -> Checkpoint | None:
    """The newest whole checkpoint of the run in its own directory, which is set back to it."""
    with contextlib.suppress(OSError):  # a place that does not answer is told by what follows
        directory.check_held()
    checkpoints = Checkpoints(checkpoint_place(config, directory), config.checkpoint)
    checkpoints.sweep()
    damaged: list[tuple[int, DamagedCheckpoint]] = []
    resumed = checkpoints.newest(damaged)
    for step, error in damaged:
        _put_aside(checkpoints, step, error, directory)
    if resumed is None:
        directory.rewind(config, -1)
        return None
    check_fits(with_local_models(resumed, directory), config)
    change = DataChange.of(resumed, config)
    directory.rewind(config, resumed.step, resumed.metrics)
    return change.applied(directory)


def finished_run(config: RunConfig) -> RunDirectory | None:
    """The run in its directory, with resume=auto, if nothing is left to do of it: it came to its end with as many steps
    as are asked for now, or reached its goal, and its model is there."""
    if config.resume != "auto" or not _there(config):
        return None
    place = RunPlace.of_run(config)
    directory = RunDirectory.open(place.path, place.url)
    events = directory.read_events()
    turns = [event for event in events if event["kind"] in (*STARTS, *ENDS)]
    if not turns or turns[-1]["kind"] != "end":
        return None
    goal, last = config.evaluation.stop_at_accuracy, events[events.index(turns[-2]) :] if len(turns) > 1 else events
    reached = any(event["kind"] == "stopped_early" and event["accuracy"] >= goal for event in last if goal is not None)
    if not reached and turns[-1]["steps"] < config.trainer.max_steps:
        return None
    return directory if directory.model.is_dir() or not config.tracking.export_model else None


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that the algorithm is the same and the model is there. The store and the trainers check columns and shapes.
    Raises `ConfigError`, `CheckpointError`."""
    before, now = checkpoint.config.get("algorithm", {}).get("name"), config.algorithm.name
    if before != now:
        raise ConfigError(
            f"algorithm={now}, and {checkpoint.directory} is of {before}. To go on from its weights only, export them: "
            f"penstock export {checkpoint.directory} DIRECTORY, and set model.path=DIRECTORY."
        )
    model = checkpoint.model_path
    if (is_url(model) and not exists(model)) or (Path(model).is_absolute() and not Path(model).is_dir()):  # no hub's id
        raise CheckpointError(
            f"{checkpoint.directory} was trained from {model}, which is gone: configuration and tokenizer come from "
            "there. Put it back, or start a new run from another model.path."
        )


@dataclass(frozen=True)
class DataChange:
    """The change of the data since a checkpoint, and where a run goes on because of it."""

    checkpoint: Checkpoint
    told: str = ""
    """What people are told; empty if nothing has changed."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig) -> "DataChange":
        """Look at the data of now. Raises `ConfigError` for another with `data.on_change=error`, `DataError` for one
        that cannot be opened."""
        start, way = checkpoint.prompts, config.data.on_change
        dataset = open_rows(config) if start.data is not None else None
        if start.data is None or dataset is None:
            return cls(checkpoint)
        changed, grown = start.data.compared(dataset, config.data)
        place = f"row {start.cursor.position:,} of epoch {start.cursor.epoch}"
        if not changed:
            if grown:
                start = replace(start, num_rows=start.num_rows or start.data.rows)
            new = ". The new rows are drawn from the next epoch on."
            return cls(replace(checkpoint, prompts=start), "; ".join(grown) + new if grown else "")
        found = f"the data is not that of {checkpoint.directory}: {'; '.join(changed)}."
        if way == "error":
            raise ConfigError(
                f"data.on_change=error: {found} Set data.on_change=restart to draw from the first row on, or "
                f"data.on_change=continue to go on after {place}."
            )
        if way == "restart":
            start = PromptStart(first_group=start.first_group)
        ends = "Rows are drawn from the first on" if way == "restart" else f"The run goes on after {place}"
        return cls(replace(checkpoint, prompts=start), f"{found} {ends} (data.on_change={way}).")

    def applied(self, directory: RunDirectory) -> Checkpoint:
        """Tell what has changed. Returns the checkpoint, with the place where the run goes on."""
        if self.told:
            directory.event("data_changed", step=self.checkpoint.step, message=self.told)
            directory.failed_writes.tell(self.told)
        return self.checkpoint


def _with_local_files(checkpoint: Checkpoint, directory: RunDirectory) -> Checkpoint:
    """Bring models and the store's part from a URL into the run's directory, since actors read files."""
    checkpoint = with_local_models(checkpoint, directory)
    if not is_url(checkpoint.directory):
        return checkpoint
    local = directory.path / "resumed_store"
    shutil.rmtree(local, ignore_errors=True)
    download(checkpoint.store, local)
    return replace(checkpoint, store_directory=str(local))


def _there(config: RunConfig) -> bool:
    """Return whether there is such a run. A run that went on elsewhere comes from its URL into its working copy."""
    place = RunPlace.of_run(config)
    bring_here(place)
    return (place.path / "config.yaml").is_file()
