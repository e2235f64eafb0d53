"""Reads what the actors of a run printed (`logs/NAME.log`): the newest lines of one or of all, in the order of time."""

import heapq
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.ui.runs.own_files import open_own

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
