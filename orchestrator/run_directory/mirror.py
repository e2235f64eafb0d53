"""Uploads what a run leaves in its directory to its URL, from a thread, while training continues.

    every few seconds:  look ─▶ due: what to upload, in order ─▶ upload: models, samples, report, …, metrics, events

Failed uploads are reported once, counted (`failed_writes.py`) and retried. At the end there is one last pass, and the
user is told which files are missing at the URL. A file appears there whole, and a file of lines up to a whole line.
The event that ends a run is uploaded once everything else of it is at the URL, so that a reader of the last event finds
the model. fsspec's `generic.rsync` does none of this: it copies events first, by their names, and half lines, and does
not report a file that fails.

`mirror.json` records what was uploaded. `is_ahead` decides which of two copies of a run is the newer one.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from penstock.conf.errors import CheckpointError, RunInUse
from penstock.conf.tracking import TrackingConfig
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.run_lock import ENDS, STARTS
from penstock.workers.runtime.local_files import write_whole
from penstock.workers.runtime.url_files import remove, upload, write_bytes

RECORD = "mirror.json"
EVENTS, METRICS, SPANS = "events.jsonl", "metrics.jsonl", "spans.jsonl"
LOGS, STATE = "logs", "state.json"
NOT_MIRRORED = frozenset({"run.lock", "resumed_store", "checkpoints", RECORD})
"""Names that are not mirrored, at any depth, as runs before the run lie below its directory. Checkpoints go to the URL
by themselves."""
NOT_FETCHED = NOT_MIRRORED | {
    "samples", "pictures", "plots", "tensorboard", "wandb", "stacks", "report.html", "cluster.json", LOGS, STATE,
}  # fmt: skip
"""Names that are not fetched when another machine continues a run at a URL."""
PACE_BYTES = 2**20
"""Bytes of an appended file that make it wait one interval more, since it is uploaded whole each time."""


class FileStamp(NamedTuple):
    """The facts by which a changed file is noticed."""

    num_bytes: int
    modified_ns: int


class RunRecords(NamedTuple):
    """The lines of one copy of a run."""

    events: bytes
    metrics: bytes


def is_mirrored(name: str) -> bool:
    """Return whether a file is mirrored. `name`: relative to the run's directory. Files that are still being written
    begin with a dot."""
    return not any(part in NOT_MIRRORED or part.startswith(".") for part in PurePosixPath(name).parts)


def is_fetched(name: str) -> bool:
    return is_mirrored(name) and NOT_FETCHED.isdisjoint(PurePosixPath(name).parts)


def is_lines(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name in (EVENTS, METRICS, SPANS) or path.parent.name == LOGS


def is_appended(name: str) -> bool:
    return is_lines(name) or PurePosixPath(name).name.startswith("events.out.tfevents.")


def due(
    seen: Mapping[str, FileStamp],
    before: Mapping[str, FileStamp],
    uploaded: Mapping[str, FileStamp],
    waited_s: Mapping[str, float],
    every_s: float,
    *,
    everything: bool = False,
) -> list[str]:
    """The files to upload now, in order: lines come last, since they refer to the other files.

    `before`: files as the last pass listed them; a file that still changes is not whole. `waited_s`: seconds since the
    last upload of a file, for those that are appended to. `everything`: nothing is written any more.
    """

    def is_due(name: str) -> bool:
        if uploaded.get(name) == seen[name]:
            return False
        if everything:
            return True
        if PurePosixPath(name).name == STATE:  # it takes its place whole, and never stays the same for long
            return True
        if is_appended(name):
            return waited_s.get(name, math.inf) >= every_s * (seen[name].num_bytes // PACE_BYTES)
        return before.get(name) == seen[name]

    def order(name: str) -> tuple[bool, bool, int, str]:
        path = PurePosixPath(name)  # of the runs before a run first
        return is_lines(name), path.name == EVENTS, -len(path.parts), name

    return [name for name in sorted(seen, key=order) if is_mirrored(name) and is_due(name)]


def replaced_model_files(seen: Mapping[str, FileStamp], uploaded: Mapping[str, FileStamp]) -> list[str]:
    """Uploaded files of a model that has been written again in other files. Nothing counts as replaced while the
    directory itself cannot be read."""
    if "config.yaml" not in seen:
        return []
    return [name for name in uploaded if name not in seen and "model" in PurePosixPath(name).parent.parts]


def whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def without_end_event(data: bytes) -> bytes:
    """Whole lines of events, without the one that says that the run is over, if no process has taken it up since."""
    kept = len(data)
    for line in reversed(data.splitlines(keepends=True)):
        kept -= len(line)
        with contextlib.suppress(ValueError, AttributeError):
            kind = json.loads(line).get("kind")
            if kind in (*STARTS, *ENDS):
                return data[:kept] if kind in ENDS else data
    return data


def is_ahead(remote: RunRecords | None, local: RunRecords | None) -> bool:
    """Return whether a run continues from the copy at its URL, and not from the one on this machine.

    Events are appended and never cut, and each process that takes a run up begins with one. So a copy that begins with
    all events of the other is as new, or newer; where neither does, another machine went on from what was at the URL,
    and what this one did not upload was done again.
    """
    if remote is None or local is None:
        return remote is not None
    if remote.events == local.events:
        return len(remote.metrics) > len(local.metrics)
    return not local.events.startswith(remote.events)


def list_files(directory: Path) -> dict[str, FileStamp]:
    """All files that are mirrored, by name."""
    found = {}
    for root, folders, names in os.walk(directory):
        folders[:] = [folder for folder in folders if is_mirrored(folder)]
        for name in filter(is_mirrored, names):
            path = Path(root, name)
            with contextlib.suppress(OSError):  # gone meanwhile
                found[path.relative_to(directory).as_posix()] = stamp_of(path)
    return found


def stamp_of(path: Path) -> FileStamp:
    """The present facts of a file. Raises `OSError`."""
    facts = path.stat()
    return FileStamp(facts.st_size, facts.st_mtime_ns)


@dataclass
class MirrorRecord:
    """`mirror.json` in a run's directory: the URL that it is mirrored to, and what was uploaded last.

    The file stays on the machine. Without it everything is uploaded again. Runs before the run, whose directories lie
    below, know by it where they are at the URL (`run_place.py`).
    """

    url: str
    files: dict[str, FileStamp] = field(default_factory=dict)
    """Files as they were when they were uploaded, by name."""

    @classmethod
    def read(cls, directory: Path) -> "MirrorRecord | None":
        """Read the record of a directory; None if it is not mirrored, or that is not known any more."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((directory / RECORD).read_text(encoding="utf-8"))
            return cls(values["url"], {name: FileStamp(*facts) for name, facts in values["files"].items()})
        return None

    @classmethod
    def of(cls, directory: Path, url: str) -> "MirrorRecord":
        """The record that is there, if it is about this URL; else a new one."""
        found = cls.read(directory)
        return found if found is not None and found.url == url else cls(url)

    @classmethod
    def above(cls, path: Path) -> "tuple[Path, MirrorRecord] | None":
        """The working copy that `path` lies in, or is, with its record."""
        for directory in (path, *path.parents):
            if (found := cls.read(directory)) is not None:
                return directory, found
        return None

    def write(self, directory: Path) -> None:
        """Write the record. Raises `OSError`."""
        files: Mapping[str, FileStamp] = self.files
        write_whole(directory / RECORD, json.dumps({"url": self.url, "files": files}) + "\n")


def url_of(path: Path) -> str | None:
    """The URL of what lies in a run's working copy; None elsewhere."""
    if (found := MirrorRecord.above(path)) is None:
        return None
    directory, record = found
    return "/".join([record.url, *path.relative_to(directory).parts])


KIND = "upload"
LONGEST_PAUSE_S = 60.0
"""Longest pause between two passes while uploads to the URL fail."""
LAST_PASSES, LAST_PAUSE_S = 3, 2.0
"""Number of passes at the end while something is missing, and the pause between two."""
DISCARD_S = 30.0
"""Deadline for the upload that is under way when a run is refused."""
TELL_AFTER_S = 5.0
"""Seconds after which a message says that the last pass is still running."""
TOLD_NAMES = 3


class Mirror:
    """Lifecycle: `begin`, `upload_now` at any time, and `close` or `discard` at the end."""

    def __init__(self, directory: Path, url: str, tracking: TrackingConfig, failed_writes: FailedWrites) -> None:
        self._directory, self._url, self._failed_writes = directory, url, failed_writes
        self._every_s, self._timeout_s = tracking.upload_every_s, tracking.upload_timeout_s
        self._record = MirrorRecord.of(directory, url)
        self._before: dict[str, FileStamp] = {}
        """Files as the last pass has listed them, by name."""
        self._uploaded_at: dict[str, float] = {}
        self._missing: list[str] = []
        """Names of the files that were missing at the URL after the last pass."""
        self._num_failures = 0
        """Number of failed passes since the last that uploaded what was due."""
        self._changed = threading.Condition()
        self._asked, self._done = 0, 0
        """Numbers of passes requested by `upload_now`, and of those that are over."""
        self._closing, self._abandoned = False, False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        with contextlib.suppress(OSError):  # first runs read their URL from it; the next failed write reports the disk
            self._record.write(self._directory)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def upload_now(self, timeout_s: float) -> bool:
        """Upload all files as they are now. Returns whether they were uploaded in time. An upload that hangs is not
        waited for again."""
        with self._changed:
            if self._thread is None or self._closing or self._asked > self._done:
                return False
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._done >= asked, timeout_s):
                return not self._missing
        self._record_failure(TimeoutError(f"no end within {timeout_s:g} s"))
        return False

    def close(self) -> list[str]:
        """Make the last pass, within its deadline. Returns the names of what is missing. May be called twice."""
        if self._thread is None:
            return []
        thread, self._thread = self._thread, None
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            thread.join(min(TELL_AFTER_S, self._timeout_s))
            if thread.is_alive():
                self._failed_writes.tell(f"{KIND}: uploading the rest to {self._url}")
                thread.join(max(0.0, self._timeout_s - TELL_AFTER_S))
        finally:
            self._abandoned = True
            missing = self._missing_of(list_files(self._directory))
            self._failed_writes.set_waiting(KIND, 0)
            if missing:
                self._failed_writes.count_lost(KIND, len(missing))
                self._failed_writes.tell(_missing_message(missing, self._url, self._directory))
        return missing

    def abandon(self) -> None:
        """Upload nothing more: another process owns the directory."""
        with self._changed:
            self._abandoned = self._closing = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Stop, and remove what was uploaded."""
        thread, self._thread = self._thread, None
        self.abandon()
        if thread is not None:
            thread.join(min(DISCARD_S, self._timeout_s))
        with contextlib.suppress(CheckpointError, OSError):
            for name in list(self._record.files):
                remove(f"{self._url}/{name}")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._asked > self._done, self._pause_s())
                asked, is_last = self._asked, self._closing
            self.upload_due(everything=is_last or asked > self._done)
            with self._changed:
                self._done = asked
                self._changed.notify_all()
            if is_last:
                break
        for _ in range(LAST_PASSES - 1):
            if not self._missing or self._abandoned:
                break
            time.sleep(LAST_PAUSE_S)
            self.upload_due(everything=True)

    def _pause_s(self) -> float:
        return max(self._every_s, min(LONGEST_PAUSE_S, self._every_s * 2.0**self._num_failures))

    def upload_due(self, *, everything: bool) -> list[str]:
        """Upload what is due. Returns the names of what is missing at the URL after that."""
        seen, lines = self._look()
        waited_s = {name: time.monotonic() - at for name, at in self._uploaded_at.items()}
        files, failures, has_changed = self._record.files, 0, False
        for name in due(seen, self._before, files, waited_s, self._every_s, everything=everything):
            if self._abandoned:
                break
            data = lines.get(name)
            is_whole = True
            if data is not None and PurePosixPath(name).name == EVENTS and _has_other_files(name, seen, files):
                held = without_end_event(data)
                is_whole, data = len(held) == len(data), held
            try:
                self._upload(name, seen[name], data)
            except (CheckpointError, OSError) as error:
                if (self._directory / name).exists():
                    failures += 1
                    self._record_failure(OSError(f"{name}: {error.__cause__ or error}"))
                continue
            self._uploaded_at[name] = time.monotonic()
            has_changed = has_changed or name not in lines
            if is_whole:
                files[name] = seen[name]
        has_changed = self._remove(replaced_model_files(seen, files)) or has_changed
        self._before = seen
        self._missing = self._missing_of(seen)
        self._failed_writes.set_waiting(KIND, len(self._missing) if failures else 0)
        self._num_failures = self._num_failures + 1 if failures else 0
        if not failures:
            self._failed_writes.record_success(KIND)
        if has_changed or everything:
            with contextlib.suppress(OSError):  # what it does not say is uploaded again
                self._record.write(self._directory)
        return self._missing

    def _look(self) -> tuple[dict[str, FileStamp], dict[str, bytes]]:
        """All files, and the whole lines of changed files of lines. Lines are read before the other files are
        listed, so that they mention no file that is not listed."""
        first = {name: facts for name, facts in list_files(self._directory).items() if is_lines(name)}
        lines = {}
        for name, facts in first.items():
            with contextlib.suppress(OSError):
                if facts != self._record.files.get(name):
                    lines[name] = whole_lines((self._directory / name).read_bytes())
        return {name: facts for name, facts in list_files(self._directory).items() if not is_lines(name)} | first, lines

    def _upload(self, name: str, seen: FileStamp, data: bytes | None) -> None:
        """Upload a file. Raises `CheckpointError`, `OSError`."""
        if data is None and is_appended(name):
            with (self._directory / name).open("rb") as file:
                data = file.read(seen.num_bytes)
        if data is not None:
            write_bytes(f"{self._url}/{name}", data)
        else:
            parent = PurePosixPath(name).parent.as_posix()
            upload(self._directory / name, self._url if parent == "." else f"{self._url}/{parent}")

    def _remove(self, names: list[str]) -> bool:
        for name in names:
            with contextlib.suppress(CheckpointError, OSError):
                remove(f"{self._url}/{name}")
                del self._record.files[name]
        return bool(names)

    def _missing_of(self, seen: Mapping[str, FileStamp]) -> list[str]:
        """Names of the files that are not at the URL as they are here."""
        uploaded = dict(self._record.files)
        return [name for name, stamp in seen.items() if uploaded.get(name) != stamp]

    def _record_failure(self, error: OSError) -> None:
        with contextlib.suppress(RunInUse):  # the run's own writes report it
            self._failed_writes.record_failure(
                KIND, error, f"It is tried again; until then it is in {self._directory} only."
            )


def _has_other_files(events: str, seen: dict[str, FileStamp], uploaded: dict[str, FileStamp]) -> bool:
    """Return whether something else of the same run is not at the URL."""
    folder = PurePosixPath(events).parent
    return any(
        name != events and uploaded.get(name) != facts
        for name, facts in seen.items()
        if folder in PurePosixPath(name).parents
    )


def _missing_message(missing: list[str], url: str, directory: Path) -> str:
    names = ", ".join(missing[:TOLD_NAMES]) + (", …" if len(missing) > TOLD_NAMES else "")
    return (
        f"{KIND}: {len(missing)} file(s) are missing at {url}: {names}. They are in {directory}; "
        f"`penstock report {url}` on this machine uploads them."
    )
