"""The output of a node's processes since the last call: for the run's directory, so that it can be read on another
machine.

The standard output and error of a process are files of Ray's, which `/proc` names.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.workers.machine.processes import ProcessId

MOST_BYTES = 1 << 18
"""Largest output of one file in one look. The excess is left out of the middle, and counted."""
STREAMS = {1: "out", 2: "err"}
MARKERS = re.compile(r":(actor_name|job_id|task_name):")
"""Pattern of lines that Ray writes into these files for itself."""

Lines = list[tuple[str, str]]
"""Lines, as stream and text."""


@dataclass
class _File:
    path: Path
    offset: int = 0
    rest: bytes = b""
    """Beginning of a line that is not whole yet."""

    def take(self) -> list[str]:
        """Whole lines since the last call."""
        try:
            with self.path.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                skipped = max(0, size - self.offset - MOST_BYTES)
                opened.seek(self.offset + skipped)
                data = opened.read(MOST_BYTES)
        except OSError:
            return []
        self.offset += skipped + len(data)
        if skipped:
            self.rest = b""
            data = data[data.find(b"\n") + 1 :]
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MOST_BYTES:
            whole, self.rest = [*whole, self.rest], b""
        lines = [line.decode(errors="replace") for line in whole]
        return [f"… {skipped:,} bytes left out …", *lines] if skipped else lines

    def end(self) -> list[str]:
        """Whole lines since the last call, and one that was never ended."""
        lines, rest = self.take(), self.rest
        self.rest = b""
        return [*lines, rest.decode(errors="replace")] if rest else lines


@dataclass
class _ProcessOutput:
    process: ProcessId
    files: dict[str, _File] = field(default_factory=dict)
    """Files by stream."""
    is_alive: bool = True
    """True if the process was alive at the last look."""


class Output:
    """Lifecycle: `take` now and then, from one thread at a time."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[_ProcessOutput]] = {}
        """Processes by name: several have had a name, one after the other."""

    def take(self, processes: Mapping[str, ProcessId]) -> dict[str, Lines]:
        """Take the output of this node's members since the last call. `processes`: those that the caller knows of, by
        name. A process's last output is taken after its death, and then the process is forgotten."""
        for name, process in processes.items():
            known = self._outputs.setdefault(name, [])
            if all(one.process != process for one in known):
                known.append(_ProcessOutput(process, _files_of(process)))
        found = {}
        for name in list(self._outputs):
            lines: Lines = []
            for one in self._outputs[name]:
                one.is_alive = one.process.is_alive  # asked before its last output is read
                for stream, file in one.files.items():
                    lines += [(stream, text) for text in (file.take() if one.is_alive else file.end())]
            self._outputs[name] = [
                one for one in self._outputs[name] if one.is_alive or processes.get(name) == one.process
            ]
            if not self._outputs[name]:
                del self._outputs[name]
            if kept := [(stream, text) for stream, text in lines if text and not MARKERS.match(text)]:
                found[name] = kept
        return found


def _files_of(process: ProcessId) -> dict[str, _File]:
    """Output files of a process. None where it prints to no file, or where this process may not look."""
    found: dict[str, _File] = {}
    if not process.is_alive:
        return found
    for number, stream in STREAMS.items():
        try:
            path = Path(os.readlink(f"/proc/{process.pid}/fd/{number}"))
        except OSError:
            continue
        if path.is_file() and all(file.path != path for file in found.values()):
            found[stream] = _File(path)
    return found
