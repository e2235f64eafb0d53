"""Copies runs behind a URL to this machine and follows them: what the page needs, and nothing twice.

Records come first, then samples, the newest first, a few at a time. A file takes its place whole.
"""

import contextlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock.conf.errors import CheckpointError
from penstock.network.names import OutsideName, below
from penstock.workers.runtime.url_files import download, file_versions

_LOG = logging.getLogger("penstock")
RECORD = re.compile(
    r"(.*/)?(config\.yaml|events\.jsonl|metrics\.jsonl|spans\.jsonl|state\.json|logs/[^/]+\.log|(model|initial_model)/tokenizer\.json)"
)
SAMPLES = re.compile(r"(.*/)?samples/step_(\d+)\.parquet")
SAMPLES_AT_ONCE = 20
"""Most files of samples that one look brings."""
LOOK_S = 5.0
"""Seconds between two looks."""


class Copy:
    """A copy that follows a URL. Lifecycle: `follow` once; `look` for a single look."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory = url.rstrip("/"), directory
        self._has: dict[str, object] = {}
        """Facts that were seen at the URL about each file that is here, by name."""
        self._num_outside = 0
        self._untaken: set[str] = set()
        """Names of files that could not be copied, which has been told."""
        self._stops = threading.Event()

    def look(self) -> bool:
        """Bring what is new. Returns whether there is more. Raises `CheckpointError`."""
        there = self._inside(file_versions(self.url))
        new = [name for name, seen in there.items() if self._has.get(name) != seen]
        records = sorted(filter(RECORD.fullmatch, new))
        samples = sorted(filter(SAMPLES.fullmatch, new), key=_step, reverse=True)
        for name in [*records, *samples[:SAMPLES_AT_ONCE]]:
            try:
                self._bring(name)
            except (CheckpointError, OSError) as error:  # such as one below another that is a file; the others come
                if name not in self._untaken:
                    _LOG.warning("%s: %.200r cannot be copied: %s", self.url, name, error)
                self._untaken.add(name)
                continue
            self._has[name] = there[name]
        for name in self._has.keys() - there.keys():
            (self.directory / name).unlink(missing_ok=True)
            del self._has[name]
        return len(samples) > SAMPLES_AT_ONCE

    def _inside(self, there: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
        """Files without names that lead out of the copy: any process that may write there may choose them."""
        outside = {name for name in there if not _is_inside(name)}
        if len(outside) > self._num_outside:
            first = min(outside)
            _LOG.warning(
                "%s: %d files are left out, whose names lead out of it: %.200r is the first.",
                self.url,
                len(outside),
                first,
            )
        self._num_outside = len(outside)
        return {name: seen for name, seen in there.items() if name not in outside}

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Bring what is there, and follow what comes in the block. Raises `CheckpointError` if nothing answers."""
        self.look()
        thread = threading.Thread(target=self._follow, name="copy of runs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stops.set()

    def bring(self, name: str) -> None:
        """Bring a file that no look brings: a picture, which is asked for once somebody sees it. Raises `OSError`."""
        try:
            self._bring(name)
        except CheckpointError as error:
            raise OSError(str(error)) from None

    def _follow(self) -> None:
        is_told = more = False
        while not self._stops.wait(0.0 if more else LOOK_S):
            try:
                more, is_told = self.look(), False
            except (CheckpointError, OSError) as error:
                more = False
                if not is_told:
                    _LOG.warning("%s: %s The page shows what it was.", self.url, error)
                is_told = True

    def _bring(self, name: str) -> None:
        target = self.directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".") as folder:
            download(self.url, Path(folder), [name])
            os.replace(Path(folder, name), target)


def _is_inside(name: str) -> bool:
    try:
        below(Path(), name)
    except OutsideName:
        return False
    return True


def _step(name: str) -> int:
    found = SAMPLES.fullmatch(name)
    return int(found[2]) if found else -1
