"""A process that an environment starts and talks to over its stdin and stdout: a line is a message, or its whole output
is its answer.

Its process group ends with it: all processes that it has started, except those that left the group by a session of
their own.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Self

SOON_S = 0.1
"""Seconds for a process to end whose streams may have ended."""
LEAVE_S = 1.0
"""Seconds for a process to end by itself when its stdin is closed; then it is killed."""
MAX_LINE_BYTES = 2**24
"""Largest size of one message, in bytes."""
MAX_TAIL = 300
"""Bytes of stderr that are reported when a process fails."""


class Child:
    """Lifecycle: `start`, `say` and `line`, `end`, after which its whole process group is gone.

    The process is waited for by `end` alone (asyncio waits for processes of its own): until then its number, which is
    its group's too, is no other process's, so what it has left behind when it ended can be killed by that number.
    """

    process: "subprocess.Popen[bytes]"
    _stdin: asyncio.StreamWriter
    _stdout: asyncio.StreamReader
    _reading: Sequence[asyncio.BaseTransport]
    """Transports that stdout and stderr come from."""
    _listening: "asyncio.Task[None]"
    _stderr = b""

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str] | None = None) -> Self:
        """Start a process. `env`: None for this process's. Raises `OSError`."""
        child = cls()
        child.process = process = subprocess.Popen(
            command, env=env, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            child._stdout, reading = await _reader(process.stdout)
            stderr, reading_errors = await _reader(process.stderr)
            child._stdin = await _writer(process.stdin)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        child._reading = (reading, reading_errors)
        child._listening = asyncio.create_task(child._read_errors(stderr))
        return child

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # children of this process are waited for by themselves
            return self.process.poll()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    async def line(self) -> bytes:
        """The next line. Empty at the end, and for a line that is too long, which ends the process."""
        try:
            return await self._stdout.readline()
        except ValueError:
            self.kill_group()
            return b""

    async def say(self, line: bytes) -> None:
        """Send a line. Raises `ConnectionError` where the process no longer reads."""
        self._stdin.write(line + b"\n")
        await self._stdin.drain()

    async def answer(self, said: bytes, most: int) -> bytes:
        """Send a message; return the process's output until it has ended, up to `most` bytes; the rest is read and
        dropped. Other processes that hold its stdout by then are not waited for."""
        heard = bytearray()
        sending = asyncio.create_task(self._send_all(said))
        reading = asyncio.create_task(_read(self._stdout, heard, most))
        try:
            await self.ended()
            self.kill_group()  # the rest of its group: then stdout ends, unless somebody has left the group
            await asyncio.wait([reading], timeout=LEAVE_S)
        finally:
            sending.cancel()
            reading.cancel()
        return bytes(heard)

    async def end(self) -> None:
        """End the process. It may end by itself first, if it does so soon."""
        try:
            self._stdin.close()
            await self.ended(LEAVE_S)
        finally:
            self.kill_group()
            self._listening.cancel()
        await self.ended(LEAVE_S)
        self.process.poll()
        for pipe in self._reading:  # nobody reads them any more
            pipe.close()

    def kill(self) -> None:
        if not self.has_ended:
            self.kill_group()

    async def ending(self, timeout_s: float = SOON_S) -> str:
        """A text on how the process has ended, and its last output. `timeout_s`: its streams end before itself."""
        await self.ended(timeout_s)
        said = self._stderr.decode(errors="replace").strip()
        code = self.exit_code
        return ("it does not answer" if code is None else f"it has ended with {code}") + (
            f"; it said last: {said}" if said else ""
        )

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended, or for `timeout_s`. The ends of pipes, which its children may hold, are not
        waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.exit_code is None:
                    await asyncio.sleep(0.01)

    def kill_group(self) -> None:
        """Kill the process with its group, unless it was waited for: then the number may be another's."""
        if self.exit_code is None or self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _send_all(self, said: bytes) -> None:
        """Send a message, which the process need not read."""
        with suppress(ConnectionError):
            await self.say(said)
        self._stdin.close()

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        while said := await stderr.read(4096):
            self._stderr = (self._stderr + said)[-MAX_TAIL:]


async def _reader(pipe: IO[bytes] | None) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


async def _writer(pipe: IO[bytes] | None) -> asyncio.StreamWriter:
    loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: protocol, pipe)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _read(stream: asyncio.StreamReader, heard: bytearray, most: int) -> None:
    while said := await stream.read(2**16):
        heard += said[: max(0, most - len(heard))]
