"""A workspace's fence with its keeper, seen from outside. The other end is `inside_workspace.py`.

It is a `FenceWorker` whose state stays: what passes a limit is ended by the keeper, and not with the fence; what is
cancelled is ended too, and its report is read before the next request. After `IDLE_S` without a request the keeper
rests, and no interpreter is left behind the fence.
"""

import asyncio
import logging
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

from penstock.conf.errors import InfrastructureError, WorkspaceError
from penstock.workers.sandbox.execution import Ending, Limits
from penstock.workers.sandbox.sandbox_worker import CREDENTIALS, START_S, FenceWorker, UsageMeter

_LOG = logging.getLogger("penstock")
IDLE_S = 2.0
"""Seconds after which an idle keeper rests. To wake it takes 50 ms, less than a model needs for its next command."""
CLOSE_S = 30.0
"""Seconds for the processes of a fence that is closed to be gone; takes 0.1 s for 300 MB of changes."""
ANCILLARY_BYTES = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(4)
END, REST, RESET, LISTEN, WAKE = b"end", b"rest", b"reset", b"listen %d", b"\n"


class WorkspaceWorker(FenceWorker):
    """Lifecycle: `start`; `execute_with`, `reset` and `rest`, one at a time; `close`."""

    grace_s = START_S
    """Longer than the sandbox's: with the fence, the tree would be lost because a machine is busy."""
    ends_with_memory = False
    allowed = frozenset({"sendmsg", "recvmsg", "flock"})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kind = ""
        """Kind of the tree: "overlay" (overlayfs), "copy" (a full copy) or "reflink" (one that shares blocks)."""
        self._is_resting = self._is_used_up = False
        self._num_unread = 0
        """Number of messages that the keeper owes: on requests whose caller was cancelled, too."""
        self._loop = asyncio.get_running_loop()
        self._removal: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Take the fence down. A thread waits for its end: the kernel frees the memory of all changes before."""
        if self._cut_off():
            self._removal = self._loop.run_in_executor(None, self.remove)

    def remove(self) -> None:
        """Do what `FenceWorker` does, and then remove what was changed from its disk."""
        super().remove()
        if self.view is not None and self.view.changes is not None:
            self.view.changes.remove()

    async def closed(self) -> None:
        """Close, and wait until the processes are gone and the memory is free; `CLOSE_S` at most, which is logged."""
        self.close()
        assert self._removal is not None
        done, _ = await asyncio.wait([self._removal], timeout=CLOSE_S)
        if not done:
            _LOG.warning("workspace: process %d of its fence is not gone after %g s", self.process.pid, CLOSE_S)

    @property
    def limits_inside(self) -> Limits:
        """Limits of a process: where a control group bounds memory, addresses are not bounded."""
        return replace(self.limits, memory_bytes=-1) if self.cgroup is not None else self.limits

    async def _handshake(self) -> None:
        await super()._handshake()
        async with asyncio.timeout(START_S):
            await self._readable()
        self.kind = self.control.recv(64).decode()
        if not self.kind:
            raise ConnectionError("the program inside ended")

    async def execute_with(
        self, files: ExitStack, request: dict[str, Any], typed: int, wall_s: float | None = None, answer: int = -1
    ) -> Ending:
        """Do what `FenceWorker` does. Raises `InfrastructureError` if the fence is gone, and the tree with it;
        `WorkspaceError` if an earlier command has used up its memory or disk."""
        await self._attend()
        try:
            ending = await super().execute_with(files, request, typed, wall_s, answer)
        except asyncio.CancelledError:
            self._num_unread += 1
            with suppress(OSError):
                self.control.send(END)
            raise
        if not self.is_open and not ending.out_of_memory and not ending.over_disk:
            self._lost("ended")
        self._is_used_up = not self.is_open
        return ending

    async def ended(self, deadline_s: float, meter: UsageMeter) -> tuple[dict[str, Any], bool]:
        """Do what `FenceWorker` does; what is over a limit is ended, and the fence stays."""
        facts, is_over = await super().ended(deadline_s, meter)
        if facts.get("lost"):
            self.control.send(END)
            async with asyncio.timeout(START_S):
                await self._readable()
            facts = self._report() | {"in_time": True}
        return facts, is_over

    async def reset(self) -> None:
        """Forget all changes of the tree and /tmp."""
        await self._attend()
        await self._asked(RESET)

    async def listener(self, port: int) -> socket.socket:
        """A socket that listens on loopback in the workspace's network. Raises `WorkspaceError`."""
        await self._attend()
        message, ancillary = await self._asked(LISTEN % port)
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                listener = socket.socket(fileno=int.from_bytes(data, sys.byteorder))
                listener.setblocking(False)
                return listener
        raise WorkspaceError(f"workspace: nothing can listen on its port {port}: {message.decode()}")

    def rest(self) -> None:
        """Leave no interpreter behind the fence until the next request."""
        if self.is_open and not self._is_resting:
            with suppress(OSError):
                self.control.send(REST)
            self._is_resting = True

    async def _attend(self) -> None:
        """Wait until the keeper serves requests and has answered earlier ones."""
        if not self.is_open:
            self._lost("was closed")
        await self._asked()
        if self._is_resting:
            self._is_resting = False
            await self._asked(WAKE)

    async def _asked(self, message: bytes = b"") -> tuple[bytes, list[Any]]:
        """Send a message; return its answer, after those that are owed, and what came with it."""
        answer: tuple[bytes, list[Any]] = b"", []
        if message:
            with suppress(OSError):  # what is lost is noticed where the answer is read
                self.control.send(message)
            self._num_unread += 1
        try:
            while self._num_unread:
                async with asyncio.timeout(START_S):
                    await self._readable()
                self._num_unread -= 1
                space = ANCILLARY_BYTES if message and not self._num_unread else 0  # of older answers nothing is taken
                answer = self.control.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)[:2]
                if not answer[0]:
                    raise ConnectionError("the program inside ended")
        except (OSError, TimeoutError) as error:
            self._lost(f"does not answer ({error or type(error).__name__})")
        return answer

    def _lost(self, what: str) -> NoReturn:
        self.close()
        if self._is_used_up:
            raise WorkspaceError(
                f"workspace: a command used up its {self.limits.memory_bytes:,} bytes of memory (Limits.memory_bytes), "
                "or commands far more of its disk than they may (Limits.tmp_bytes, tmp_files), and what was changed in "
                "it is lost with it."
            )
        raise InfrastructureError(
            f"workspace: its fence {what}, and what was changed in it is lost. Did the machine run out of memory, or "
            "did someone kill it? An attempt that it belongs to is played again (environment.retries)."
        )
