"""Files of one JSON object a line, whole whenever their writer stops.

A line is appended by one call (`failed_writes.py`). A kill can cut the last one short: readers leave such an end out,
and the next writer removes it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_TAIL = 1 << 16
"""Bytes read at a time when looking for the end of the last whole line."""
MOST_LEVELS = 100
"""Deepest nesting of lists and mappings: Python's own limit is a thousand calls, some of which are taken."""


def line_of(values: Mapping[str, Any]) -> str:
    return json_of(values) + "\n"


def json_of(value: Any) -> str:
    """The JSON of a value, whatever is in it."""
    try:  # what has neither NaN nor infinity needs no copy: nearly all, and thousands of values each step
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """The value as JSON can hold it: NaN, infinity and integers beyond any float, which JSON lacks, become null;
    numpy's numbers become Python's. `levels`: most levels of lists and mappings; a deeper one becomes "…"."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, int | float):
        return value if abs(value) <= sys.float_info.max else None
    if isinstance(value, Mapping | list | tuple):
        if not levels:
            return "…"
        if isinstance(value, Mapping):
            return {str(key): plain(item, levels - 1) for key, item in value.items()}
        return [plain(item, levels - 1) for item in value]
    return value if value is None or isinstance(value, str) else str(value)


def open_for_lines(file: Path) -> int:
    """Open a file for appending, after the last whole line: what a killed writer left of another is cut away."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    end = os.lseek(descriptor, 0, os.SEEK_END)
    kept = end
    while kept and b"\n" not in (tail := os.pread(descriptor, min(kept, _TAIL), max(0, kept - _TAIL))):
        kept -= len(tail)
    if kept:
        kept = max(0, kept - _TAIL) + tail.rindex(b"\n") + 1
    if kept != end:
        os.ftruncate(descriptor, kept)
    return descriptor


def truncate_lines(file: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Cut a JSONL file off before its first line that is not to be kept. Returns the lines that stay. Takes no room on
    the disk."""
    lines, kept, end = read_lines(file), [], 0
    if all(map(is_kept, lines)):
        return lines
    with file.open("r+b") as opened:
        for line in opened:
            value = object_of(line.decode(errors="replace"))
            if value is not None and not is_kept(value):
                break
            kept += [value] if value is not None else []
            end += len(line)
        opened.truncate(end)
    return kept


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut off is left out."""
    return list(iter_lines(file))


def iter_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one at a time; a last line that was cut off is left out."""
    if not file.is_file():
        return
    with file.open("rb") as opened:
        for line in opened:
            value = object_of(line.decode(errors="replace")) if line.endswith(b"\n") else None
            if value is not None:
                yield value


def object_of(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # of bytes that are no UTF-8, too
        return None
    return value if isinstance(value, dict) else None
