"""Reads `spans.jsonl` by step, while it is being written: the place of each line is remembered, and only lines that are
shown are read.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.ui.runs.own_files import open_own

HEAD = re.compile(rb'\{"step": ?(\d{1,18}),')
MAX_LINE = 2**24
"""Largest size of a line, in bytes; what is longer was not written by a run."""
MOST_STEPS = 40
"""Most steps of one answer."""


class Traced:
    """Lifecycle: `update` now and then, `lines` in between."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._identity: tuple[int, int] | None = None
        self._end = 0
        self._places: dict[int, tuple[int, int]] = {}
        """Offset and length of the newest line of each step, by step."""

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The first and the last step."""
        return (min(self._places), max(self._places)) if self._places else None

    def update(self) -> None:
        try:
            with open_own(self._file.parent, self._file.name) as opened:
                status = os.fstat(opened.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._end:  # cut by a run that goes on from before
                    self._identity, self._end, self._places = identity, 0, {}
                opened.seek(self._end)
                while line := opened.readline(MAX_LINE):
                    if not line.endswith(b"\n") and len(line) < MAX_LINE:
                        break
                    if (found := HEAD.match(line)) and line.endswith(b"\n"):
                        self._places[int(found[1])] = (self._end, len(line))
                    self._end += len(line)
        except FileNotFoundError:
            self._identity, self._end, self._places = None, 0, {}

    def lines(self, first: int, last: int) -> list[dict[str, Any]]:
        """Lines of the steps between two, the last `MOST_STEPS` of them. A line that is no JSON is left out."""
        steps = [step for step in sorted(self._places) if first <= step <= last][-MOST_STEPS:]
        found = []
        with open_own(self._file.parent, self._file.name) as opened:
            for step in steps:
                offset, length = self._places[step]
                opened.seek(offset)
                try:
                    found.append(json.loads(opened.read(length)))
                except (ValueError, RecursionError):
                    continue
        return found
