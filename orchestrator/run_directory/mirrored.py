"""Rules of mirroring: which files of a run's directory are to be at its URL, when a file is due to be uploaded, which
copy of a run is the newer one, and the record of what was uploaded. Pure, but for `look` and the record.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from penstock.orchestrator.run_directory.run_lock import ENDS, STARTS
from penstock.workers.machine.local_files import write_whole

RECORD = "mirror.json"
EVENTS, METRICS, SPANS = "events.jsonl", "metrics.jsonl", "spans.jsonl"
LOGS, STATE = "logs", "state.json"
NOT_MIRRORED = frozenset({"run.lock", "resumed_store", "checkpoints", RECORD})
"""Names that are not mirrored, at any depth, as runs before the run lie below its directory. Checkpoints go to the URL
by themselves."""
NOT_FETCHED = NOT_MIRRORED | {
    "samples", "pictures", "plots", "tensorboard", "wandb", "stacks", "report.html", "cluster.json", LOGS, STATE,
}  # fmt: skip
"""Names that are not fetched when a run at a URL goes on elsewhere."""
PACE_BYTES = 2**20
"""Bytes of an appended file that make it wait one interval more, since it is uploaded whole each time."""


class FileStamp(NamedTuple):
    """The facts by which a changed file is noticed."""

    num_bytes: int
    modified_ns: int


class Lines(NamedTuple):
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
    """The files to upload now, in order: lines come last, since they tell of the others.

    `before`: what the last look has seen; a file that still changes is not whole. `waited_s`: seconds since the last
    upload of a file, for those that are appended to. `everything`: nothing is written any more.
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


def gone(seen: Mapping[str, FileStamp], uploaded: Mapping[str, FileStamp]) -> list[str]:
    """Uploaded files of a model that has been written again in other files. Nothing counts as gone while the directory
    itself cannot be seen."""
    if "config.yaml" not in seen:
        return []
    return [name for name in uploaded if name not in seen and "model" in PurePosixPath(name).parent.parts]


def whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def without_end(data: bytes) -> bytes:
    """Whole lines of events, without the one that says that the run is over, if no process has taken it up since."""
    kept = len(data)
    for line in reversed(data.splitlines(keepends=True)):
        kept -= len(line)
        with contextlib.suppress(ValueError, AttributeError):
            kind = json.loads(line).get("kind")
            if kind in (*STARTS, *ENDS):
                return data[:kept] if kind in ENDS else data
    return data


def is_ahead(remote: Lines | None, local: Lines | None) -> bool:
    """Return whether a run is to go on from the copy at its URL, and not from the one on this machine.

    Events are appended and never cut, and each process that takes a run up begins with one. So a copy that begins with
    all events of the other is as new, or newer; where neither does, another machine went on from what was at the URL,
    and what this one did not bring there any more was done again.
    """
    if remote is None or local is None:
        return remote is not None
    if remote.events == local.events:
        return len(remote.metrics) > len(local.metrics)
    return not local.events.startswith(remote.events)


def look(directory: Path) -> dict[str, FileStamp]:
    """All files that are mirrored, by name."""
    found = {}
    for root, folders, names in os.walk(directory):
        folders[:] = [folder for folder in folders if is_mirrored(folder)]
        for name in filter(is_mirrored, names):
            path = Path(root, name)
            with contextlib.suppress(OSError):  # gone meanwhile
                found[path.relative_to(directory).as_posix()] = seen_of(path)
    return found


def seen_of(path: Path) -> FileStamp:
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
