"""A process that an environment starts and talks to over its stdin and stdout: one line is one message, or all that it
says is its answer.

Its process group ends with it: all that it has started, but what has left the group by a session of its own.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

SOON_S = 0.1
"""For a process to end whose streams may have ended."""
LEAVE_S = 1.0
"""For a process to end by itself when its stdin is closed; then it is killed."""
MAX_LINE_BYTES = 2**24
"""Of one message."""
MAX_TAIL = 300
"""Bytes of stderr that are told where a process fails."""


class Child:
    """Lifecycle: `start`, `say` and `line`, `end`, after which its whole process group is gone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr = b""
        self._listening = asyncio.create_task(self._hear_errors())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str] | None = None) -> Self:
        """`env`: this process's without one. Raises `OSError`."""
        return cls(
            await asyncio.create_subprocess_exec(
                *command, env=env, start_new_session=True, limit=MAX_LINE_BYTES,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )
        )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def line(self) -> bytes:
        """Nothing at the end, and for a line that is too long, which ends it."""
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline()
        except ValueError:
            self._kill()
            return b""

    async def say(self, line: bytes) -> None:
        """Raises `ConnectionError` where it no longer reads."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def answer(self, said: bytes, most: int) -> bytes:
        """What it says to this until it has ended, up to so many bytes; the rest is read and let go. Whatever else
        holds its stdout by then is not waited for."""
        assert self._process.stdout is not None
        heard = bytearray()
        telling = asyncio.create_task(self._tell(said))
        hearing = asyncio.create_task(_read(self._process.stdout, heard, most))
        try:
            await self.ended()
            self._kill()  # the rest of its group: then stdout ends, unless somebody has left the group
            await asyncio.wait([hearing], timeout=LEAVE_S)
        finally:
            telling.cancel()
            hearing.cancel()
        return bytes(heard)

    async def end(self) -> None:
        """It may end by itself first, if it does so soon."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            await self.ended(LEAVE_S)
        finally:
            self._kill()
            self._listening.cancel()
        await self.ended(LEAVE_S)
        self._process._transport.close()  # type: ignore[attr-defined]  # of pipes that nobody reads any more

    def kill(self) -> None:
        if not self.has_ended:
            self._kill()

    async def epitaph(self, timeout_s: float = SOON_S) -> str:
        """How it has ended, and what it said last, in words. `timeout_s`: its streams end before itself."""
        await self.ended(timeout_s)
        said = self._stderr.decode(errors="replace").strip()
        code = self._process.returncode
        return ("it does not answer" if code is None else f"it has ended with {code}") + (
            f"; it said last: {said}" if said else ""
        )

    async def ended(self, timeout_s: float | None = None) -> None:
        """Or so many seconds later. Not `process.wait()`, which waits for the ends of pipes as well, that its children
        may hold."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.has_ended:
                    await asyncio.sleep(0.01)

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _tell(self, said: bytes) -> None:
        """It need not read it."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            await self.say(said)
        self._process.stdin.close()

    async def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        while said := await self._process.stderr.read(4096):
            self._stderr = (self._stderr + said)[-MAX_TAIL:]


async def _read(stream: asyncio.StreamReader, heard: bytearray, most: int) -> None:
    while said := await stream.read(2**16):
        heard += said[: max(0, most - len(heard))]
