"""`mirror.json` in a run's directory: the URL that it is mirrored to, and what was uploaded last.

The file stays on the machine. Without it everything is uploaded again. Runs before the run, whose directories lie
below, know by it where they are at the URL (`run_place.py`).
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.orchestrator.run_directory.mirrored import RECORD, Seen
from penstock.workers.whole_files import write_whole


@dataclass
class MirrorRecord:
    url: str
    files: dict[str, Seen] = field(default_factory=dict)
    """Files as they were when they were uploaded, by name."""

    @classmethod
    def read(cls, directory: Path) -> "MirrorRecord | None":
        """Read the record of a directory; None if it is not mirrored, or that is not known any more."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((directory / RECORD).read_text(encoding="utf-8"))
            return cls(values["url"], {name: Seen(*facts) for name, facts in values["files"].items()})
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
        files: Mapping[str, Seen] = self.files
        write_whole(directory / RECORD, json.dumps({"url": self.url, "files": files}) + "\n")


def url_of(path: Path) -> str | None:
    """The URL of what lies in a run's working copy; None elsewhere."""
    if (found := MirrorRecord.above(path)) is None:
        return None
    directory, record = found
    return "/".join([record.url, *path.relative_to(directory).parts])
