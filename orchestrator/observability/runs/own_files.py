"""Reads files of a run's directory safely, as any process may have written them.

Only plain files in the directory itself are opened: no link is followed, also none on the way, and nothing waits for a
pipe. What is read has limits of bytes, depth and kinds, so that a bad file can only make its run look odd.
"""

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from penstock.orchestrator.run_directory.json_lines import object_of
from penstock.orchestrator.run_directory.run_directory import LOADER

TAIL_BYTES = 1 << 18
"""Bytes at a file's end in which the newest values are looked for."""
NUMBERS = (
    "step", "from_step", "cpus", "gpus", "silent_s", "seconds", "tokens_again", "steps_again", "accuracy", "goal",
)  # fmt: skip
"""Keys of events whose values are numbers."""
MOST_CONFIG_BYTES = 1 << 20
"""Largest size of a configuration, which has some KiB."""
MOST_STATE_BYTES = 1 << 25
"""Largest size of a `state.json`, which has some MiB with a thousand engines."""
MOST_TOKENIZER_BYTES = 1 << 27
MOST_LEVELS = 64
"""Deepest nesting of lists and mappings in YAML. PyYAML's parser in C calls itself for each, and some ten thousand end
the process."""
LONG_NUMBER = re.compile(r"[-+.\d][\d_:.xa-f]{400,}", re.IGNORECASE)
"""Pattern of long numbers: PyYAML reads numbers of base 60 in a time that grows with the square of their digits."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_own(run: Path, name: str) -> BinaryIO:
    """Open a file. `name`: its path below the run's directory. Raises `FileNotFoundError`, or another `OSError` for
    what is no plain file of this directory."""
    *folders, last = PurePosixPath(name).parts
    place = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, _DIRECTORY, dir_fd=place)
            os.close(place)
            place = inner
        descriptor = os.open(last, _FILE, dir_fd=place)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _refusal(run, name) from None
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(run, name)
    return os.fdopen(descriptor, "rb")


def _refusal(run: Path, name: str) -> OSError:
    text = "is no plain file of the run's own directory, and the page follows no link: put the file there"
    return OSError(errno.ELOOP, text, str(run / name))


def is_own(run: Path, name: str) -> bool:
    """Return whether there is such a plain file. Raises `OSError` where that may not be known."""
    try:
        return stat.S_ISREG((run / name).lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_own(run: Path, name: str, most: int) -> bytes:
    """Read a whole file. Raises `OSError`, also for one of more than `most` bytes."""
    with open_own(run, name) as opened:
        found = opened.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes, the most that the page reads of it", str(run / name))
    return found


def read_json(run: Path, name: str, most: int) -> Any:
    """Read a JSON file; None if it is not there, or no JSON. Raises `OSError`."""
    try:
        return json.loads(read_own(run, name, most))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def last_lines(run: Path, name: str, most: int) -> list[dict[str, Any]]:
    """The objects of the last whole lines, from so many bytes of the file's end. Raises `OSError`."""
    try:
        with open_own(run, name) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - most))
            text = opened.read(most)
    except FileNotFoundError:
        return []
    found = map(object_of, text.split(b"\n")[(1 if size > most else 0) : -1])
    return [value for value in found if value is not None]


def read_events(run: Path) -> list[dict[str, Any]]:
    """The newest events of `events.jsonl`. A value that should be a number and is none is left out of its event, so
    that callers can calculate with the rest. Raises `OSError`."""
    return [
        {key: value for key, value in event.items() if key not in NUMBERS or is_number(value)}
        for event in last_lines(run, "events.jsonl", TAIL_BYTES)
    ]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, also as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def first_line(run: Path, name: str, most: int) -> dict[str, Any] | None:
    """The object of the first line, of at most `most` bytes. Raises `OSError`."""
    try:
        with open_own(run, name) as opened:
            return object_of(opened.readline(most))
    except FileNotFoundError:
        return None


def read_config(run: Path) -> dict[str, Any]:
    """Read `config.yaml`. Empty where it is no configuration: of another version, or half of one. Raises `OSError`."""
    try:
        text = read_own(run, "config.yaml", MOST_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return {}
    try:
        _check(text)
        found = yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError, OverflowError):  # a date or a number that is none, or that no float holds
        return {}
    return found if isinstance(found, dict) else {}


def _check(text: str) -> None:
    """Raise `ValueError` for YAML of which a small file can make a large value or an end of the process: aliases, many
    levels; long numbers, whose reading takes its time; and types by name, for which the loader raises whatever Python
    does. No run writes any of these."""
    level = 0
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"*{event.anchor}: an alias.")
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) not in (None, "!"):
            raise ValueError(f"{event.tag}: a type by name.")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and LONG_NUMBER.fullmatch(event.value):
            raise ValueError(f"{event.value[:20]}…: a number of {len(event.value)} characters.")
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} levels.")


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty where it is none, as in one of another version."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
