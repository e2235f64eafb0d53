"""The checkpoints of a run as files: which are complete, which may be deleted, what one holds, and the models it names.

    checkpoints/global_step_20/
        trainer/         weights and optimizer in shards with an index, and what is no tensor, written by the ranks
        store/           the store's snapshot: groups on their way, with their columns
        manifest.json    step, prompts' place, model, sizes and checksums of the trainer's files
        COMPLETE         written last, once all else survives a power cut: without it, the checkpoint does not count

Checkpoints are written while training goes on. The place may be an fsspec URL. A model that was made for a run with a
URL as output_dir (a fresh one, a warm start's) lies in the run's working copy, which is elsewhere on another machine: a
checkpoint names it by its URL.
"""

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from penstock.conf.errors import CheckpointError, DamagedCheckpoint
from penstock.conf.faults import CheckpointConfig
from penstock.network.names import OutsideName, below
from penstock.orchestrator.run_directory.checkpoint import FORMAT, Checkpoint
from penstock.orchestrator.run_directory.mirror import MirrorRecord, url_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.prompts.data_identity import DataIdentity
from penstock.workers.prompts.order import CurriculumState, PromptCursor
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.local_files import staged_directory
from penstock.workers.runtime.url_files import (
    SavedFile,
    download,
    exists,
    file_fault,
    is_url,
    list_names,
    move,
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

    def prune(self) -> list[int]:
        """Delete checkpoints that are neither among the newest nor to be kept for good, marker first. Returns their
        steps."""
        every = self._config.keep_every_steps
        old = [step for step in self.steps()[: -self._config.keep_last] if not (every and step % every == 0)]
        for step in old:
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
    for folder in (place, f"{place}/checkpoints"):
        steps = Checkpoints(folder, CheckpointConfig()).steps()
        if steps:
            return open_checkpoint(f"{folder}/{PREFIX}{steps[-1]}")
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


def way_out(place: str) -> str:
    """Advice for an error message: the checkpoint before this one, if any."""
    parent, _, name = place.rstrip("/").rpartition("/")
    number = name.removeprefix(PREFIX)
    before = [
        step for step in Checkpoints(parent, CheckpointConfig()).steps() if number.isdigit() and step < int(number)
    ]
    return f"The one before is {parent}/{PREFIX}{before[-1]}." if before else "There is none before it."


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
