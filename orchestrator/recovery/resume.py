"""Resume and return: a run continues from a checkpoint, in a later command or within the same one.

    resume=never     a new run
    resume=auto      the run called `name`: with its living actors, where the command that drove it has died
                     (`takeover.py`); else from its newest checkpoint; a new run if there is no such run
    resume=PATH      a new run, from that checkpoint (or the newest of that run)
    return           a fleet has failed, and no restart can help: it ends, and another starts from the newest checkpoint

The first three happen before any actor starts. The directory is locked before anything in it is touched, and so is
checkpoint.directory if it is a local one: another process may still write there.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.conf.errors import CheckpointError, ConfigError, DamagedCheckpoint, PenstockError, is_refusal
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.checkpoints import (
    Checkpoints,
    checkpoint_place,
    open_checkpoint,
    with_local_models,
)
from penstock.orchestrator.cluster.ray_calls import first_line, is_recoverable
from penstock.orchestrator.cluster.ray_cluster import is_over
from penstock.orchestrator.recovery.decisions import EndRun, RunFaults
from penstock.orchestrator.recovery.takeover import OrphanedRun
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.fetching import fetch_run
from penstock.orchestrator.run_directory.run_directory import RunDirectory, to_yaml
from penstock.orchestrator.run_directory.run_lock import ENDS, STARTS
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.store.errors import CorruptSnapshot
from penstock.store.service.snapshot import check as check_snapshot
from penstock.workers.prompts.opening import open_rows
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.url_files import absolute, download, exists, is_url
from penstock.workers.user_code import GIVEN


def open_run(
    config: RunConfig, find_orphan: Callable[[RunDirectory], OrphanedRun | None] = lambda directory: None
) -> tuple[RunDirectory, Checkpoint | OrphanedRun | None]:
    """The run's directory, locked, with its first event written, and what it continues from. `find_orphan`: returns
    the actors of the run whose command has died. What does not fit is refused before anything is made or changed.
    Raises `ConfigError`, `CheckpointError`, `RunInUse`, and what `find_orphan` raises."""
    if config.resume == "auto" and _exists(config):
        place = RunPlace.of_run(config)
        directory = RunDirectory.open(place.path, place.url)
        directory.lock(directory.path, f"name={config.name}")
        with _locked(directory, config):
            return directory, _begin(directory, config, find_orphan(directory) or _rewind_to_newest(directory, config))
    if config.resume not in ("auto", "never"):
        resumed = open_checkpoint(absolute(config.resume))
        check_fits(resumed, config)
        change = DataChange.of(resumed, config)
        directory = RunDirectory.create(config)
        with _locked(directory, config):
            return directory, _begin(directory, config, change.applied(directory))
    directory = RunDirectory.create(config)
    with _locked(directory, config):
        return directory, _begin(directory, config, None)


@contextlib.contextmanager
def _locked(directory: RunDirectory, config: RunConfig) -> Iterator[None]:
    """Lock the place of the checkpoints, too. If the block fails, the directory is closed, and removed if it is new."""
    try:
        if config.checkpoint.directory is not None and not is_url(config.checkpoint.directory):
            with contextlib.suppress(ConfigError):  # one that cannot be made is reported by its first checkpoint
                directory.lock(Path(checkpoint_place(config, directory)), "checkpoint.directory")
        yield
    except BaseException as error:
        if is_refusal(error) and directory.is_unused:
            directory.discard()
        directory.close()
        raise


def _begin(
    directory: RunDirectory, config: RunConfig, resume_from: Checkpoint | OrphanedRun | None
) -> Checkpoint | OrphanedRun | None:
    """Write the first event. Returns what the run continues from, with local files."""
    directory.mirror(config.tracking)
    if resume_from is None:
        about = {"recipe": config.recipe, "algorithm": config.algorithm.name, "max_staleness": config.max_staleness}
        directory.event("start", **about)
        return None
    if isinstance(resume_from, OrphanedRun):
        directory.rewind(config)
        step = max((int(line.get("step", 0)) for line in directory.read_metrics()), default=0)
        silent_s = round(resume_from.silent_s, 3)
        directory.event("taken_over", step=step, epoch=resume_from.owner.epoch, silent_s=silent_s)
        return resume_from
    directory.event("resume", step=resume_from.step, path=resume_from.directory)
    return _with_local_files(resume_from, directory)


class CheckpointReturn:
    """The returns of a run to its newest checkpoint, or to its beginning, within one command.

    Lifecycle: `after` each failure of a fleet, then another fleet starts from `resumed`; `done` once it serves."""

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        note: Callable[[str], None],
        faults: RunFaults,
        resumed: Checkpoint | None,
        *,
        has_started: bool = False,
    ) -> None:
        """`note`: called with what people read. `resumed`: the checkpoint that the command continues from."""
        self._directory, self._config, self._note, self._faults = directory, config, note, faults
        self.resumed = self._first = resumed
        """The checkpoint that the next fleet starts from; None: the beginning."""
        self.has_started = has_started
        """True once a fleet of the run has served."""
        self._cause: PenstockError | None = None
        """The failure that the run returns for, until it has returned."""
        self._from_step = 0
        """The step that the run returns from."""

    def after(self, failure: PenstockError, step: int, *, has_read_checkpoint: bool) -> None:
        """Set the run back after a failure of its fleet. Raises the failure that the run ends with, where it is not to
        return. `step`: the last that was logged. `has_read_checkpoint`: the fleet started from `resumed`; one that was
        taken over did not."""
        if self._fell_back(failure, step, has_read_checkpoint):
            return
        if not self._is_due(failure, step):
            if self._cause is None:
                raise failure
            raise self._cause from failure
        self._cause = self._cause or failure
        try:
            own = rewind(self._directory, self._config)
        except PenstockError as error:
            self._directory.event("return_failed", error=type(error).__name__, message=str(error))
            raise self._cause from error
        self.resumed = own if own is not None else self._first

    def done(self) -> None:
        """Note that the fleet serves, which ends a return if one was under way."""
        self.has_started = True
        if self._cause is None:
            return
        step = self.resumed.step if self.resumed is not None else 0
        seconds = self._faults.returned(time.monotonic())
        steps, tokens = self._faults.time.trained_after(step)
        self._cause = None
        self._directory.event("returned", step=step, seconds=round(seconds, 3), steps_again=steps, tokens_again=tokens)
        self._note(f"continues after step {step}, {seconds:.1f} s after the failure")

    def _is_due(self, failure: PenstockError, step: int) -> bool:
        """Return whether the run is to return.

        A failure in a run's very first start is reported at once: its settings are the usual reason. A run that takes
        no checkpoints ends with what it has; one that has taken none yet begins again.
        """
        if self._cause is not None:
            self._directory.event("return_failed", error=type(failure).__name__, message=str(failure))
        if not (is_recoverable(failure) and self.has_started) or is_over():
            return False
        now = time.monotonic()
        if self._cause is not None:
            decision = self._faults.return_failed(first_line(failure), now, self._from_step)
        else:
            decision, self._from_step = self._faults.decide_return("the run", "", now, step), step
        has_checkpoint = self._first is not None or self._has_own()
        if isinstance(decision, EndRun) or not (has_checkpoint or self._config.checkpoint.every_steps):
            lacks = "" if isinstance(decision, EndRun) else ", and it takes no checkpoints"
            self._directory.event("given_up", reason=f"{decision.reason}{lacks}")
            return False
        about = {"from_step": self._from_step, "error": type(failure).__name__, "message": str(failure)}
        self._directory.event("returning", **about)
        place = "the last checkpoint" if has_checkpoint else "the beginning, as no checkpoint was taken yet"
        self._note(f"returning to {place}: {first_line(failure)}")
        return True

    def _has_own(self) -> bool:
        """Return whether this run has a checkpoint of its own that can be read."""
        with contextlib.suppress(PenstockError):
            return _checkpoints_of(self._directory, self._config).newest() is not None
        return False

    def _fell_back(self, failure: PenstockError, step: int, has_read_checkpoint: bool) -> bool:
        """Fall back to the checkpoint before `resumed`, if that has been found damaged; it is put aside. Returns
        whether it did: not where it is another run's, or there is none before it."""
        resumed, checkpoints = self.resumed, _checkpoints_of(self._directory, self._config)
        if resumed is None or step > resumed.step:
            return False
        damage = damage_of(resumed, failure, has_read_checkpoint)
        is_own = resumed.directory == checkpoints.directory(resumed.step)
        if damage is None or not is_own or checkpoints.steps()[:1] == [resumed.step]:
            return False
        _put_aside(checkpoints, resumed.step, damage, self._directory)
        if (own := rewind(self._directory, self._config)) is None:
            return False
        self._first = own if self._first is resumed else self._first
        self.resumed = own
        return True


def damage_of(resumed: Checkpoint, failure: PenstockError, has_read_it: bool) -> PenstockError | None:
    """The damage of a checkpoint that actors have failed of; None: of something else. `has_read_it`: the store started
    from it, too. Actors that were taken over did not, and it may have been removed since."""
    if isinstance(failure, DamagedCheckpoint):
        return failure
    try:
        if has_read_it:
            check_snapshot(resumed.store)  # a store that cannot read it dies of that, as of anything else
    except CorruptSnapshot as error:
        return error
    return None


def _put_aside(checkpoints: Checkpoints, step: int, error: PenstockError, directory: RunDirectory) -> None:
    aside = checkpoints.put_aside(step)
    directory.event("checkpoint_damaged", step=step, path=aside, message=str(error))
    directory.failed_writes.tell(
        f"the checkpoint of step {step} is damaged and was put aside as {aside}; the one before is taken: {error}"
    )


def _checkpoints_of(directory: RunDirectory, config: RunConfig) -> Checkpoints:
    return Checkpoints(checkpoint_place(config, directory), config.checkpoint)


def rewind(directory: RunDirectory, config: RunConfig) -> Checkpoint | None:
    """The newest whole checkpoint of a run that this process drives, which is set back to it, with local files; None:
    the run is set back to its beginning. No process writes there any more. Raises `CheckpointError`, `ConfigError`."""
    resumed = _rewind_to_newest(directory, config)
    return _with_local_files(resumed, directory) if resumed is not None else None


def _rewind_to_newest(directory: RunDirectory, config: RunConfig) -> Checkpoint | None:
    """The newest whole checkpoint of the run in its own directory, which is set back to it."""
    with contextlib.suppress(OSError):  # a place that does not answer is reported by what follows
        directory.check_held()
    checkpoints = _checkpoints_of(directory, config)
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
    if config.resume != "auto" or not _exists(config):
        return None
    place = RunPlace.of_run(config)
    directory = RunDirectory.open(place.path, place.url)
    events = directory.read_events()
    marks = [index for index, event in enumerate(events) if event["kind"] in (*STARTS, *ENDS)]
    if not marks or events[marks[-1]]["kind"] != "end":
        return None
    goal, last = config.evaluation.stop_at_accuracy, events[marks[-2] :] if len(marks) > 1 else events
    reached = any(event["kind"] == "stopped_early" and event["accuracy"] >= goal for event in last if goal is not None)
    if not reached and events[marks[-1]]["steps"] < config.trainer.max_steps:
        return None
    return directory if directory.model.is_dir() or not config.tracking.export_model else None


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that the algorithm is the same and the model is there. The store and the trainers check columns and shapes.
    Raises `ConfigError`, `CheckpointError`."""
    before, now = checkpoint.config.get("algorithm", {}).get("name"), config.algorithm.name
    if before != now:
        raise ConfigError(
            f"algorithm={now}, and {checkpoint.directory} is of {before}. To continue from its weights only, export "
            f"them: penstock export {checkpoint.directory} DIRECTORY, and set model.path=DIRECTORY."
        )
    model = checkpoint.model_path
    if (is_url(model) and not exists(model)) or (Path(model).is_absolute() and not Path(model).is_dir()):  # no hub's id
        raise CheckpointError(
            f"{checkpoint.directory} was trained from {model}, which is gone: configuration and tokenizer come from "
            "there. Put it back, or start a new run from another model.path."
        )


@dataclass(frozen=True)
class DataChange:
    """The change of the data since a checkpoint, and where a run continues because of it."""

    checkpoint: Checkpoint
    told: str = ""
    """The change in words; empty if nothing has changed."""

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
                f"data.on_change=continue to draw after {place}."
            )
        if way == "restart":
            start = PromptStart(first_group=start.first_group)
        ends = "Rows are drawn from the first on" if way == "restart" else f"The run continues after {place}"
        return cls(replace(checkpoint, prompts=start), f"{found} {ends} (data.on_change={way}).")

    def applied(self, directory: RunDirectory) -> Checkpoint:
        """Report what has changed. Returns the checkpoint, with the place where the run continues."""
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


def _exists(config: RunConfig) -> bool:
    """Return whether there is such a run. A run that went on elsewhere comes from its URL into its working copy. Raises
    `ConfigError` for one of `penstock.train` that this process has not the functions and rows of."""
    place = RunPlace.of_run(config)
    fetch_run(place)
    file = place.path / "config.yaml"
    if not file.is_file():
        return False
    if _has_inline_values(file.read_text(encoding="utf-8")) and not _has_inline_values(to_yaml(config)):
        raise ConfigError(
            f"name={config.name}: {place.path} is a run of penstock.train, and no file has the functions and rows that "
            "were given to it. Repeat that call in Python, which resumes the run, or choose another name."
        )
    return True


def _has_inline_values(text: str) -> bool:
    return GIVEN in " ".join(text.split())  # YAML folds long lines
