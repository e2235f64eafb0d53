"""The checkpoints of a run: as files (`Checkpoints`), and how they are taken while it continues, at step boundaries
(`CheckpointWriter`).

    checkpoints/global_step_20/
        trainer/         weights and optimizer in shards with an index, and what is no tensor, written by the ranks
        store/           the store's snapshot: groups on their way, with their columns
        manifest.json    step, prompts' place, model, sizes and checksums of the trainer's files
        scores.json      what the evaluation of this version has measured, once it is known
        COMPLETE         written last, once all else survives a power cut: without it, the checkpoint does not count

The place may be an fsspec URL. A model that was made for a run with a URL as output_dir (a fresh one, a warm start's)
lies in the run's working copy, which is elsewhere on another machine: a checkpoint names it by its URL.

    begin(N):  trainers begin (they copy while the next batch is sampled) ─▶ store.cut ─▶ prompts' place
                  │ all of one moment: no update is under way
    meanwhile: store.snapshot, trainers finish ─▶ collected from other disks ─▶ all there? ─▶ manifest, sync, marker

Checkpoints are taken one at a time: a second waits for the first. If one fails, the failure is reported and counted,
and what it has written is removed (it may be what filled the disk). The run continues, since its last good checkpoint
is still there; only the last checkpoint of a run must not fail. One that missed its deadline may still be being
written: the trainers begin no other before it has ended, so those due meanwhile are skipped. What it writes late is
removed before the next.
"""

import asyncio
import contextlib
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, PenstockError, ResourceError
from penstock.conf.faults import CheckpointConfig
from penstock.conf.run import RunConfig
from penstock.network.names import OutsideName, below
from penstock.orchestrator.checkpointing.retention import ranked, score_of, steps_to_remove
from penstock.orchestrator.cluster.ray_calls import GRACE_S, answer, answers, cause_of, is_recoverable
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.checkpoint import FORMAT, Checkpoint, trainer_directory
from penstock.orchestrator.run_directory.json_lines import object_of, plain
from penstock.orchestrator.run_directory.mirror import MirrorRecord, url_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data import durable
from penstock.store.service.snapshot import snapshot_files
from penstock.workers.prompts.data_identity import DataIdentity
from penstock.workers.prompts.order import CurriculumState, PromptCursor
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.local_files import staged_directory
from penstock.workers.runtime.url_files import (
    SavedFile,
    absolute,
    download,
    exists,
    file_fault,
    is_url,
    list_names,
    move,
    read_optional,
    read_text,
    remove,
    size_fault,
    sync,
    upload_directory,
    write_text,
)

PREFIX = "global_step_"
ASIDE = "damaged_"
MARKER = "COMPLETE"
MANIFEST = "manifest.json"
SCORES = "scores.json"
T = TypeVar("T")


class Checkpoints:
    """The checkpoints below one place.

    checkpoints = Checkpoints("runs/a/checkpoints", config.checkpoint)
    ...                                   # files below checkpoints.directory(20)
    checkpoints.seal(Checkpoint(...))     # complete from here on
    checkpoints.prune()
    """

    _under_way: ClassVar[dict[str, dict[object, "Checkpoints"]]] = defaultdict(dict)
    """Calls in threads of this process that have not ended, by place, and whose each is. A place that does not answer
    keeps them."""

    def __init__(self, place: str, config: CheckpointConfig) -> None:
        self.place = place.rstrip("/")
        self._config = config
        self._evaluated: dict[int, dict[str, Any]] = {}
        """What was measured of the checkpoints' versions, by step, as far as it was written or read."""
        self._is_given_up = False

    async def apart(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call of this object, or another that uses its place, in a thread."""
        number, under_way = object(), self._under_way[self.place]

        def noted() -> T:
            try:
                return call(*arguments)
            finally:
                del under_way[number]

        under_way[number] = self
        return await asyncio.to_thread(noted)

    @property
    def is_used_by_another(self) -> bool:
        """True while a call of another object for the same place is under way: the run has returned without it."""
        return any(user is not self for user in list(self._under_way[self.place].values()))

    def give_up(self) -> None:
        """Complete no checkpoint from now on, also not in a thread that is late: the run ends, or returns."""
        self._is_given_up = True

    def directory(self, step: int) -> str:
        return f"{self.place}/{PREFIX}{step}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [step for step in self._all() if exists(f"{self.directory(step)}/{MARKER}")]

    def clear(self, step: int) -> None:
        """Remove what a run that died left of this step."""
        if not exists(f"{self.directory(step)}/{MARKER}"):
            remove(self.directory(step))

    def unseal(self, step: int) -> None:
        """Make a complete checkpoint count no longer: the run has gone back behind its step, and writes it anew."""
        self._evaluated.pop(step, None)
        remove(f"{self.directory(step)}/{MARKER}")

    def add_directory(self, step: int, name: str, directory: Path) -> None:
        """Bring a local directory to a place that is a URL."""
        upload_directory(directory, f"{self.directory(step)}/{name}")

    def seal(self, checkpoint: Checkpoint, snapshot: Iterable[SavedFile] = (), brought: Collection[str] = ()) -> None:
        """See that every part is there, write the manifest, sync all of it, and then write the marker. Raises
        `CheckpointError` that names the first part at fault.

        `snapshot`: the store's files, by names below `store/`. `brought`: those of `trainer/` that came from other
        machines. These are read back to their end; of the others, whose writers have read them back, the size counts.
        """
        for file in checkpoint.files:
            place = checkpoint.trainer
            is_read = file.name in brought
            fault = file_fault(place, file) if is_read else size_fault(f"{place}/{file.name}", file.num_bytes)
            _refuse(f"{place}/{file.name}", fault)
        for file in snapshot:
            _refuse(f"{checkpoint.directory}/store/{file.name}", file_fault(f"{checkpoint.directory}/store", file))
        write_text(f"{checkpoint.directory}/{MANIFEST}", checkpoint.to_json())
        sync(checkpoint.directory)
        if self._is_given_up:
            raise CheckpointError(f"{checkpoint.directory}: the run has ended or returned before it was complete.")
        write_text(f"{checkpoint.directory}/{MARKER}", f"{checkpoint.step}\n")

    def add_scores(self, step: int, evaluated: Mapping[str, Any]) -> None:
        """Keep what was measured of a complete checkpoint's version."""
        write_text(f"{self.directory(step)}/{SCORES}", json.dumps(plain(evaluated)))
        self._evaluated[step] = dict(evaluated)

    def scores(self) -> dict[int, float]:
        """Scores of the complete checkpoints that have one, by step."""
        found = {step: score_of(self._evaluated_at(step), self._config) for step in self.steps()}
        return {step: score for step, score in found.items() if score is not None}

    def _evaluated_at(self, step: int) -> dict[str, Any]:
        if step not in self._evaluated and (data := read_optional(f"{self.directory(step)}/{SCORES}")) is not None:
            self._evaluated[step] = object_of(data) or {}
        return self._evaluated.get(step, {})

    def prune(self, awaited: Collection[int] = ()) -> list[int]:
        """Delete checkpoints that need not stay, marker first. Returns their steps. `awaited`: steps whose evaluation
        has not ended."""
        scores = self.scores() if self._config.keep_best else {}
        old = steps_to_remove(self.steps(), scores, awaited, self._config)
        for step in [] if self._is_given_up else old:
            remove(f"{self.directory(step)}/{MARKER}")
            remove(self.directory(step))
        return old

    def sweep(self) -> None:
        """Delete what was never completed. Only at the start of a run, when no process writes."""
        for step in self.unfinished():
            remove(self.directory(step))

    def unfinished(self) -> list[int]:
        """Steps of incomplete checkpoints: they are being written, or the process that wrote them has died."""
        complete = self.steps()
        return [step for step in self._all() if step not in complete]

    def newest(self, damaged: list[tuple[int, DamagedCheckpoint]] | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole. `damaged`: filled with the steps of those after it and their errors.
        Raises `DamagedCheckpoint` if there are some and none is whole."""
        faults = damaged if damaged is not None else []
        for step in reversed(self.steps()):
            try:
                return open_checkpoint(self.directory(step))
            except DamagedCheckpoint as error:
                faults.append((step, error))
        if faults:
            raise faults[0][1]
        return None

    def put_aside(self, step: int) -> str:
        """Rename a damaged checkpoint so that it counts no longer, and people can look at it. Returns its new place."""
        name, taken = f"{ASIDE}{PREFIX}{step}", list_names(self.place)
        others = (f"{name}_{number}" for number in count(2))
        aside = f"{self.place}/{next(free for free in chain([name], others) if free not in taken)}"
        move(self.directory(step), aside)
        return aside

    def _all(self) -> list[int]:
        numbers = (name.removeprefix(PREFIX) for name in list_names(self.place) if name.startswith(PREFIX))
        return sorted(int(number) for number in numbers if number.isdigit())


def open_checkpoint(place: str) -> Checkpoint:
    """The checkpoint in a directory, or the newest of a run's or of a `checkpoints/` directory. Its files are there in
    their sizes; checksums are checked when they are read.

    Raises `CheckpointError` that names what is wrong, and the one before if there is one: `DamagedCheckpoint` for files
    that are missing or cut.
    """
    place = place.rstrip("/")
    if steps := (found := _checkpoints_at(place)).steps():
        return open_checkpoint(found.directory(steps[-1]))
    if not exists(f"{place}/{MARKER}"):
        raise CheckpointError(
            f"{place} is no checkpoint: it has no file {MARKER}. {way_out(place)} Give resume= the directory "
            f"of a run, or one called {PREFIX}N of a run that was saved (checkpoint.every_steps)."
        )
    try:
        values = json.loads(read_text(f"{place}/{MANIFEST}"))
        if (found := values.pop("format")) != FORMAT:
            raise CheckpointError(
                f"{place}/{MANIFEST}: its format is {found}, and this Penstock reads {FORMAT}. Resume it with the "
                "one that wrote it."
            )
        prompts = values.pop("prompts")
        cursor = PromptCursor.from_dict(prompts["cursor"])
        state = CurriculumState.from_dict(prompts["curriculum"]) if prompts.get("curriculum") else None
        data = DataIdentity.from_dict(prompts["data"]) if prompts.get("data") else None
        start = PromptStart(cursor, int(prompts["first_group"]), state, data, prompts.get("num_rows"))
        files = [SavedFile(**entry) for entry in values.pop("files")]
        checkpoint = Checkpoint(directory=place, prompts=start, files=files, **values)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{place}/{MANIFEST}: cannot be read ({error}). {way_out(place)}") from None
    except OSError as error:
        raise CheckpointError(f"{place}/{MANIFEST}: cannot be read ({error}). {way_out(place)}") from None
    _check_sizes(checkpoint)
    return checkpoint


def _checkpoints_at(place: str) -> Checkpoints:
    """The checkpoints of a `checkpoints/` directory, or of a run's."""
    here, below = (Checkpoints(folder, CheckpointConfig()) for folder in (place, f"{place.rstrip('/')}/checkpoints"))
    return here if here.steps() else below


def best_checkpoint(place: str) -> tuple[Checkpoint, str]:
    """The best checkpoint of a run, or of a `checkpoints/` directory, by the run's `checkpoint.best_metric`, and what
    there is to say of its score. Raises `CheckpointError`."""
    if exists(f"{place}/{MARKER}"):
        raise CheckpointError(f"{place} is one checkpoint, and --best chooses among those of a run. Leave out --best.")
    checkpoints = _checkpoints_at(place)
    if (newest := checkpoints.newest()) is None:
        raise CheckpointError(
            f"--best: {place} has no checkpoints to choose from. Give it the directory of a run that was saved "
            "(checkpoint.every_steps), or its checkpoint.directory."
        )
    own = newest.config.get("checkpoint", {})
    keys = {key: own[key] for key in ("best_metric", "best_mode") if key in own}
    config = CheckpointConfig(**keys)
    scores = Checkpoints(checkpoints.place, config).scores()
    if not scores:
        steps = ", ".join(map(str, checkpoints.steps()))
        raise CheckpointError(
            f"--best: no checkpoint in {checkpoints.place} (steps {steps}) has a score, {config.best_metric}. Set "
            "evaluation.every_steps, and checkpoint.keep_best=1 to save each evaluated step; resume=auto goes on with "
            "the run. Without --best the newest one is exported."
        )
    best = ranked(scores, config)[0]
    told = f"step {best}: {config.best_metric}={scores[best]:.4g}, the best of {len(scores)} checkpoint(s) with a score"
    return open_checkpoint(checkpoints.directory(best)), told


def way_out(place: str) -> str:
    """Advice for an error message: the checkpoint before this one, if any."""
    parent, _, name = place.rstrip("/").rpartition("/")
    number = name.removeprefix(PREFIX)
    before = [
        step for step in Checkpoints(parent, CheckpointConfig()).steps() if number.isdigit() and step < int(number)
    ]
    return f"The one before is {parent}/{PREFIX}{before[-1]}." if before else "There is none before it."


def portable_path(path: str, directory: RunDirectory) -> str:
    """A model's path as other machines know it."""
    return path if directory.url is None or not Path(path).is_absolute() else url_of(Path(path)) or path


def local_path(model: str, directory: RunDirectory) -> str:
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
        path = local_path(model, directory)
        if is_url(model) and "resumed_models" in Path(path).parts:
            bring_model(model, Path(path))
        return path

    return with_models(checkpoint, brought)


def bring_model(url: str, directory: Path) -> None:
    """Download a model, unless it is there. Raises `CheckpointError`."""
    if not directory.is_dir():
        with staged_directory(directory) as part:
            download(url, part)


def with_models(checkpoint: Checkpoint, place_of: Callable[[str], str]) -> Checkpoint:
    others = {name: place_of(model) for name, model in checkpoint.model_paths.items()}
    return replace(checkpoint, model_path=place_of(checkpoint.model_path), model_paths=others)


def _refuse(place: str, fault: str | None) -> None:
    if fault is not None:
        raise CheckpointError(
            f"{place} {fault} as this machine sees it, and it has been written. Give checkpoint.directory a directory "
            "that all nodes share, and that keeps what it is given, or a URL."
        )


def _check_sizes(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        path = f"{checkpoint.trainer}/{file.name}"
        if fault := size_fault(path, file.num_bytes):
            raise DamagedCheckpoint(f"{path} {fault}. {way_out(checkpoint.directory)}")


RETRY_S = 1.0
"""Seconds between two tries to begin the last checkpoint."""
BRING_S = 60.0
"""Longest wait until what the run has written is at its URL. A checkpoint counts all the same after that."""


class CheckpointWriter:
    """Lifecycle: `begin` at any number of step boundaries, `finish` at the end."""

    def __init__(self, context: RunContext) -> None:
        fleet, config = context.fleet, context.config
        self._fleet, self._store, self._config = fleet, context.store, config
        self._directory, self._progress = context.directory, context.progress
        self._checkpoints = Checkpoints(checkpoint_place(config, context.directory), config.checkpoint)
        self._writing: asyncio.Task[PenstockError | None] | None = None
        resumed = fleet.resumed
        is_own = resumed is not None and resumed.directory == self._checkpoints.directory(resumed.step)
        self._newest = resumed.step if is_own and resumed is not None else None
        """Step of the checkpoint that was begun last, or that the run resumed from: it is not written again."""
        self._places: dict[str, str] = {}
        """Directory that each rank writes to, by name: on its own disk, where it does not see the driver's."""
        self._left: set[int] = set()
        """Steps of failed checkpoints: a part of them may have come after they were removed."""
        self._awaited: set[int] = set()
        """Steps whose evaluation has not ended: their checkpoints stay until then."""
        self._scores: dict[int, Mapping[str, Any]] = {}
        """What was measured of steps whose checkpoints do not have it yet."""
        self._scoring: set[asyncio.Task[None]] = set()
        self._lacking: set[int] = set()
        """Steps whose checkpoints could not be written."""
        self._pruning = asyncio.Lock()
        self.failed = 0
        """Number of checkpoints that could not be written."""

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether this step is to be saved. `is_last`: the run ends with it, before the steps that were asked
        for."""
        every = self._config.checkpoint.every_steps
        if not every or step == self._newest:
            return False
        is_scored = self._config.saves_evaluated and self._config.evaluates(step)
        return is_last or is_scored or step % every == 0 or step == self._config.trainer.max_steps

    def directory(self, step: int) -> str:
        """The directory or URL of the checkpoint after a step."""
        return self._checkpoints.directory(step)

    def await_score(self, step: int) -> None:
        """Keep the checkpoint of this step until `scored`: it is being evaluated, or will be."""
        self._awaited.add(step)

    def awaits_score(self, step: int) -> bool:
        """Return whether the checkpoint of this step stays until `scored`."""
        return step in self._awaited

    def has_failed(self, step: int) -> bool:
        """Return whether the checkpoint after this step could not be written."""
        return step in self._lacking

    async def has(self, step: int) -> bool:
        """Return whether the checkpoint after this step is complete, once the one that is being written is."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self._config.checkpoint.timeout_s)
        with contextlib.suppress(CheckpointError):
            return step in await self._checkpoints.apart(self._checkpoints.steps)
        return False

    async def lacks_score(self, step: int) -> bool:
        """Return whether the run continues from its checkpoint of this step, and ended while that was evaluated, where
        the best are kept."""
        if not self._config.saves_evaluated or step != self._newest:
            return False
        with contextlib.suppress(CheckpointError):  # a place that does not answer is reported by the next one
            return step not in await self._checkpoints.apart(self._checkpoints.scores)
        return False

    def scored(self, step: int, evaluated: Mapping[str, Any]) -> None:
        """Add what was measured of a step's version to its checkpoint, once it is complete, without pausing training.
        `evaluated`: metrics; empty if the evaluation is lost."""
        if not self._config.checkpoint.every_steps:
            return
        self._awaited.discard(step)
        self._scores |= {step: evaluated} if evaluated else {}
        scoring = asyncio.create_task(self._add_scores())
        self._scoring.add(scoring)
        scoring.add_done_callback(self._scoring.discard)

    async def _add_scores(self) -> None:
        """Prune, tolerating a place that cannot be written: the next score or checkpoint tries it again."""
        try:
            if removed := await self._prune():
                self._directory.event("checkpoints_removed", steps=removed)
        except (OSError, CheckpointError) as error:
            advice = "The next score or checkpoint tries it again."
            self._directory.failed_writes.record_failure("scores", error, advice)
        else:
            self._directory.failed_writes.record_success("scores")

    async def adopt(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Go on after another process, which may have died during a checkpoint: its ranks may write it still, and it
        counts for nothing. `step`: the step whose checkpoint is taken if it is due and not there; None: that comes
        later. Raises as `begin` does."""
        if not self._config.checkpoint.every_steps:
            return
        with contextlib.suppress(CheckpointError):  # a place that does not answer is reported by the next one
            self._left |= set(await self._checkpoints.apart(self._checkpoints.unfinished))
            if step is None:
                return
            if step in await self._checkpoints.apart(self._checkpoints.steps):
                self._newest = step
            elif self.is_due(step):
                await self.begin(step, metrics, is_last=True)

    async def begin(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> float:
        """Take the state of now, after step `step`. Returns its cost in seconds. `metrics`: those of that step, as far
        as they are known. `is_last`: the checkpoint is the run's last, and waits for an earlier one that is late.
        Raises `DeadlineExceeded`, `WorkerDied`, `DataflowError` for a state that no checkpoint can keep."""
        started = time.monotonic()
        await self.finish()
        place = self._checkpoints.directory(step)
        patience_s = self._config.checkpoint.timeout_s if is_last or step == self._config.trainer.max_steps else 0.0
        why_not = (
            f"{place}: not begun, because an earlier checkpoint has missed its deadline "
            f"(checkpoint.timeout_s={self._config.checkpoint.timeout_s:g}) and is still being written. See whether "
            "checkpoint.directory answers."
        )
        try:
            if self._checkpoints.is_used_by_another:
                raise CheckpointError(
                    "what was begun there before the run returned has not ended. See whether it answers."
                )
            await self._checkpoints.apart(self._make_room, step)
            begun = await self._trainers_begin(step, patience_s)
        except (OSError, CheckpointError, ResourceError) as error:
            begun, why_not = False, f"{place}: cannot be written: {error}"
        if not begun:
            self._writing = asyncio.create_task(self._not_begun(step, why_not))
            return time.monotonic() - started
        self._newest = step
        self._lacking.discard(step)
        if self._config.evaluates(step):
            self.await_score(step)
        try:
            start = await self._cut(step)
        except PenstockError as error:
            if not is_recoverable(error):
                raise
            self._writing = asyncio.create_task(self._take_back(step, error))
            return time.monotonic() - started
        checkpoint = Checkpoint(
            place, step, start, self._fleet.model_path, dict(self._config.model.paths), config=asdict(self._config),
            head="scores" if self._fleet.flow.of_kind("train")[0].is_scored else "policy", metrics=plain(metrics),
        )  # fmt: skip
        checkpoint = with_models(checkpoint, lambda model: portable_path(model, self._directory))
        self._writing = asyncio.create_task(self._write_or_report(checkpoint))
        return time.monotonic() - started

    async def _cut(self, step: int) -> PromptStart:
        """Take the store's state of now, and the prompts' place in it."""
        admitted = await self._in_time(self._store.cut(), "Store", step)
        name, prompts = (await self._fleet.present("prompts"))[0]
        start: PromptStart = await self._in_time(prompts.start_after.remote(admitted), name, step)
        return start

    async def _trainers_begin(self, step: int, patience_s: float) -> bool:
        """Return whether the trainers begin: they do not while one of them still writes an earlier checkpoint."""
        trainers, deadline = self._fleet.role("trainer"), time.monotonic() + patience_s
        directory, epoch = trainer_directory(self._checkpoints.directory(step)), self._fleet.owner.epoch
        self._places = dict.fromkeys([name for name, _ in trainers], directory)
        with contextlib.suppress(OSError):  # one that cannot be made is reported by the ranks
            self._places = await self._fleet.places(directory)
        while True:
            calls = [(name, handle.begin_saving.remote(self._places[name], epoch)) for name, handle in trainers]
            if all(await answers(calls, phase=_phase(step), timeout_s=self._config.checkpoint.timeout_s)):
                return True
            if time.monotonic() >= deadline:
                await self._discard(directory)
                return False
            await asyncio.sleep(min(RETRY_S, patience_s))

    async def _discard(self, directory: str) -> None:
        """Remove what ranks may have written on their own disks. A rank that still writes removes its part itself."""
        with contextlib.suppress(PenstockError):  # the nodes remove it at the end of the run
            await self._fleet.discard(directory, self._places)

    def _make_room(self, step: int) -> None:
        """Remove an earlier checkpoint of this step, so that nothing of it is taken for a part of the new one."""
        self._checkpoints.unseal(step)
        self._clear(step)

    def _clear(self, step: int) -> None:
        """Remove what failed checkpoints have left, and what a run that died left of this step."""
        for left in {step, *self._left}:
            self._checkpoints.clear(left)

    async def give_up(self) -> None:
        """Complete no checkpoint any more: the run ends, or returns. What is there of one stays for the next run to
        sweep."""
        self._checkpoints.give_up()
        under_way = [*self._scoring, *([self._writing] if self._writing is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def finish(self, *, strict: bool = False) -> None:
        """Wait for the checkpoint that is being written, and for scores. `strict`: raise what it failed with."""
        error = await self._writing if self._writing is not None else None
        self._writing = None  # only now: `has` waits for it, too
        await asyncio.gather(*self._scoring)
        if strict and error is not None:
            raise error

    async def _write_or_report(self, checkpoint: Checkpoint) -> PenstockError | None:
        """Write a checkpoint. Returns its error, which is reported and counted, if any."""
        try:
            await self._write(checkpoint)
            return None
        except OSError as error:
            failure: PenstockError = CheckpointError(f"{checkpoint.directory}: cannot be written: {error}")
        except PenstockError as error:
            failure = error
        return await self._take_back(checkpoint.step, failure)

    async def _take_back(self, step: int, failure: PenstockError) -> PenstockError:
        """Remove what there is of a failed checkpoint, and count and tell its error."""
        await self._discard(trainer_directory(self._checkpoints.directory(step)))
        self._left.add(step)
        with contextlib.suppress(OSError, CheckpointError):  # the next run sweeps what cannot be removed now
            await self._checkpoints.apart(self._clear, step)
        return self._failed(step, failure)

    async def _not_begun(self, step: int, why: str) -> PenstockError:
        return self._failed(step, CheckpointError(why))

    def _failed(self, step: int, failure: PenstockError) -> PenstockError:
        """Count a failure and tell of it."""
        self.failed += 1
        self._lacking.add(step)
        self._directory.event("checkpoint_failed", step=step, error=type(failure).__name__, message=str(failure))
        self._progress.note(f"a checkpoint could not be written, the one before stays: {failure}")
        return failure

    async def _write(self, checkpoint: Checkpoint) -> None:
        step, started = checkpoint.step, time.time()
        calls = [
            self._in_time(handle.finish_saving.remote(), name, step, GRACE_S)
            for name, handle in self._fleet.role("trainer")
        ]
        with _store_place(checkpoint) as root:
            snapshot = self._store.snapshot(root, step, keep=1, timeout_s=self._config.checkpoint.timeout_s)
            calls.append(self._in_time(snapshot, "Store", step, GRACE_S))
            *saved, cut = await _all_ended(*calls)
            parts = _files_of(Path(cut), root)
            if root != checkpoint.store:
                await self._checkpoints.apart(self._checkpoints.add_directory, step, "store", Path(root))
        await self._fleet.collect(checkpoint.trainer, self._places)
        checkpoint.files.extend(file for files in saved for file in files)
        by_rank = zip(self._places.values(), saved, strict=True)
        brought = [file.name for place, files in by_rank if place != checkpoint.trainer for file in files]
        await self._checkpoints.apart(self._sync_lines)  # one that counts has the lines of all steps before
        await asyncio.to_thread(self._directory.upload_now, BRING_S)
        await self._checkpoints.apart(self._checkpoints.seal, checkpoint, parts, brought)
        removed = await self._prune()
        num_bytes = sum(file.num_bytes for file in checkpoint.files)
        self._directory.event("checkpoint", step=step, path=checkpoint.directory, bytes=num_bytes, removed=removed)
        self._directory.timeline.span("checkpoint", "write", started, time.time(), step=step)

    async def _prune(self) -> list[int]:
        """Add the scores that have come to their checkpoints, and remove the checkpoints that need not stay any more.
        Returns their steps."""
        async with self._pruning:
            complete = await self._checkpoints.apart(self._checkpoints.steps)
            come = [(step, self._scores[step]) for step in sorted(self._scores.keys() & set(complete))]
            for step, evaluated in come:
                await self._checkpoints.apart(self._checkpoints.add_scores, step, evaluated)
                del self._scores[step]
            removed = await self._checkpoints.apart(self._checkpoints.prune, set(self._awaited))
            if come and self._config.checkpoint.keep_best:
                self._report_best(dict(come), await self._checkpoints.apart(self._checkpoints.scores))
            return removed

    def _report_best(self, come: Mapping[int, Mapping[str, Any]], scores: Mapping[int, float]) -> None:
        """Report the scores that have come, and which checkpoint is the best by now."""
        config = self._config.checkpoint
        order = ranked(scores, config)
        for step, evaluated in come.items():
            if order and (score := score_of(evaluated, config)) is not None:
                best = {"best": order[0], "best_score": scores[order[0]]}
                self._directory.event("checkpoint_scored", step=step, metric=config.best_metric, score=score, **best)

    def _sync_lines(self) -> None:
        """Have the lines of the steps so far survive a power cut. A checkpoint counts without them, too."""
        with contextlib.suppress(OSError):
            durable.sync(self._directory.metrics_file)
            durable.sync_name(self._directory.metrics_file)

    async def _in_time(self, call: Awaitable[Any], name: str, step: int, grace_s: float = 0.0) -> Any:
        return await answer(call, name=name, phase=_phase(step), timeout_s=self._config.checkpoint.timeout_s + grace_s)


async def _all_ended(*calls: Awaitable[Any]) -> list[Any]:
    """Results of the calls. Raises the error that explains the rest, once no call writes any longer."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    if failures := [result for result in results if isinstance(result, BaseException)]:
        raise cause_of(failures)
    return results


def checkpoint_place(config: RunConfig, directory: RunDirectory) -> str:
    """The directory or URL of a run's checkpoints."""
    if (place := config.checkpoint.directory) is not None:
        return absolute(place)
    return str(directory.checkpoints) if directory.url is None else f"{directory.url}/{directory.checkpoints.name}"


def _files_of(snapshot: Path, root: str) -> list[SavedFile]:
    """Files of the store's snapshot, by their names below `root`."""
    below = snapshot.relative_to(root).as_posix()
    return [SavedFile(f"{below}/{name}", *facts) for name, facts in snapshot_files(snapshot).items()]


@contextlib.contextmanager
def _store_place(checkpoint: Checkpoint) -> Iterator[str]:
    """The place that the store writes to: the checkpoint itself, or a local directory if that is a URL."""
    if not is_url(checkpoint.directory):
        yield checkpoint.store
        return
    with tempfile.TemporaryDirectory(prefix="penstock-store-") as folder:
        yield folder


def _phase(step: int) -> str:
    return f"checkpoint of step {step}"
