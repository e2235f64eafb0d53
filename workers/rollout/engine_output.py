"""What the processes of vLLM's engine print: passed on to where it would have gone, its end kept for the error message
when a process dies.

The engine process and its workers are children of this process. They inherit its standard output and error, and say why
they fail only there. So both lead into a pipe while the engine is started; a thread passes on what comes, as long as a
process has the other end open.
"""

import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TAIL_BYTES = 1 << 16
SHOWN_LINES = 12
MAX_LINE_CHARS = 300
_REDIRECTED = threading.Lock()
"""Lock around redirection. Standard output belongs to the whole process, so one engine is started after the other."""
_ORIGIN = re.compile(r"^\([\w ]*\bpid=\d+\)\s?")
_LOG = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure): \S")
_POINTS_ELSEWHERE = re.compile(r"root cause above|stack trace|background process", re.IGNORECASE)


class EngineOutput:
    """The output of the processes. Lifecycle: `captured` around their start, `tail` at any time from then on."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._reading = threading.Lock()
        self._pipe = self._onward = -1

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what is printed within the block, and by processes started within it for as long as they live."""
        with _REDIRECTED:
            self._pipe, entrance = os.pipe()
            os.set_blocking(self._pipe, False)
            _flush()
            output, self._onward = os.dup(1), os.dup(2)
            os.dup2(entrance, 1)
            os.dup2(entrance, 2)
            os.close(entrance)
            threading.Thread(target=self._pass_on, name="engine-output", daemon=True).start()
            try:
                yield
            finally:
                _flush()
                os.dup2(output, 1)
                os.dup2(self._onward, 2)
                os.close(output)

    def tail(self) -> str:
        """The end of what was printed so far, including everything from a dead process."""
        self._drain()
        return bytes(self._kept).decode(errors="replace")

    def _pass_on(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            poll.poll()
            if not self._drain():
                return

    def _drain(self) -> bool:
        """Read the pipe. False at its end: no process can write into it any more."""
        with self._reading:
            while self._pipe >= 0:
                try:
                    chunk = os.read(self._pipe, TAIL_BYTES)
                except BlockingIOError:
                    return True
                if not chunk:
                    os.close(self._pipe)
                    os.close(self._onward)
                    self._pipe = -1
                    break
                self._kept += chunk
                del self._kept[:-TAIL_BYTES]
                with suppress(OSError):  # no process reads it: it is kept all the same
                    _write(self._onward, chunk)
            return False


def failure_message(reason: str, output: str, ended: str = "") -> str:
    """The message for an engine that failed with `reason`: the cause in its output, if there is one, and the last lines
    of the output. `ended`: how its processes ended."""
    lines = [line for line in map(_without_origin, output.splitlines()) if line]
    cause = find_cause(lines)
    if cause is None and not _POINTS_ELSEWHERE.search(reason):
        return reason
    shown = cause or (f"its process ended: {ended}" if ended else "it ended without saying why")
    if not lines:
        return f"{shown} ({reason})"
    return "\n".join([shown, "The end of its output:", *(f"  {line}" for line in lines[-SHOWN_LINES:]), reason])


def find_cause(lines: list[str]) -> str | None:
    """The last error raised in these lines that does not point to another one."""
    raised = [line for line in lines if _RAISED.match(line) and not _POINTS_ELSEWHERE.search(line)]
    return raised[-1] if raised else None


def _without_origin(line: str) -> str:
    """The line without process, logger, and the underlining of a traceback."""
    text = _LOG.sub("", _ORIGIN.sub("", line)).rstrip(" ^\r")
    return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or no process reads it
            stream.flush()
