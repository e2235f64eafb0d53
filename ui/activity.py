"""The activity of a run's actors: the times at which they were busy (`spans.jsonl`), and what they printed
(`logs/NAME.log`).

Spans are read by step, while they are being written: the place of each line is remembered, and only lines that are
shown are read. Of logs, the newest lines of one actor or of all are read, in the order of time.
"""

import heapq
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.runs.own_files import open_own

HEAD = re.compile(rb'\{"step": ?(\d{1,18}),')
MAX_LINE = 2**24
"""Largest size of a line, in bytes; what is longer was not written by a run."""
MOST_STEPS = 40
"""Most steps of one answer."""
TAIL_BYTES = 1 << 18
"""Bytes of a file, from its end, that are read."""
MOST_LINES = 1000
"""Most lines of one answer, the newest."""
MOST_CHARACTERS = 4000
"""Most characters of one line."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LINE = re.compile(r"(\S+Z) (out|err) (.*)")
TROUBLE = re.compile(
    r"(?i:\b(error|exception|traceback|fatal|killed|out of memory|oom|segmentation fault|core dumped)\b)"
    r"|[A-Z]\w*(Error|Exception)\b"
)


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


def members(folder: Path) -> list[str]:
    """Names of the members that printed something."""
    return sorted(file.stem for file in folder.glob("*.log") if not file.stem.endswith(".before"))


def printed(folder: Path, member: str = "", text: str = "", only_trouble: bool = False) -> dict[str, Any]:
    """Lines that were printed. `member`: only lines of that one. `text`: only lines that contain it, in any case.
    `only_trouble`: only lines that look like an error. Raises `LookupError` for a member that printed nothing."""
    names = members(folder)
    if member and member not in names:
        raise LookupError(f"{member!r:.200} printed nothing.")
    wanted = text.lower()
    found = [
        line
        for line in heapq.merge(*(_lines(folder, name) for name in names if member in ("", name)), key=_time)
        if wanted in line["text"].lower() and (line["trouble"] or not only_trouble)
    ]
    return {"members": names, "lines": found[-MOST_LINES:], "more": max(0, len(found) - MOST_LINES)}


def _time(line: dict[str, Any]) -> str:
    return str(line["time"])


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    with open_own(folder.parent, f"{folder.name}/{name}.log") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - TAIL_BYTES))
        whole = opened.read(TAIL_BYTES).decode(errors="replace").split("\n")
    for line in whole[1 if size > TAIL_BYTES else 0 :]:
        if found := LINE.fullmatch(line):
            text = COLOURS.sub("", found[3][:MOST_CHARACTERS])
            trouble = bool(TROUBLE.search(text))
            yield {"time": found[1], "member": name, "stream": found[2], "text": text, "trouble": trouble}
