"""`mirror.json` in a run's directory: the URL that it is mirrored to, and what was uploaded last.

It stays on the machine. Without it everything is uploaded again. Runs before the run, whose directories lie below, know
by it where they are at the URL (`run_place.py`).
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.orchestrator.recording.mirrored import RECORD, Seen
from penstock.workers.whole_files import write_whole


@dataclass
class MirrorRecord:
    url: str
    files: dict[str, Seen] = field(default_factory=dict)
    """As they were when they were uploaded."""

    @classmethod
    def read(cls, directory: Path) -> "MirrorRecord | None":
        """None: it is not mirrored, or that is not known any more."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((directory / RECORD).read_text(encoding="utf-8"))
            return cls(values["url"], {name: Seen(*facts) for name, facts in values["files"].items()})
        return None

    @classmethod
    def of(cls, directory: Path, url: str) -> "MirrorRecord":
        """The one that is there, if it is about this URL."""
        found = cls.read(directory)
        return found if found is not None and found.url == url else cls(url)

    @classmethod
    def above(cls, path: Path) -> "tuple[Path, MirrorRecord] | None":
        """The working copy that `path` lies in, or is."""
        for directory in (path, *path.parents):
            if (found := cls.read(directory)) is not None:
                return directory, found
        return None

    def write(self, directory: Path) -> None:
        """Raises `OSError`."""
        files: Mapping[str, Seen] = self.files
        write_whole(directory / RECORD, json.dumps({"url": self.url, "files": files}) + "\n")


def url_of(path: Path) -> str | None:
    """Of what lies in a run's working copy."""
    if (found := MirrorRecord.above(path)) is None:
        return None
    directory, record = found
    return "/".join([record.url, *path.relative_to(directory).parts])
