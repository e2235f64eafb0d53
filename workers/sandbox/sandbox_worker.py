"""A fence with its keeper, seen from outside: start it, give it executions one after the other, end it.

The other end is `inside.py`. Input and output are memory files: the keeper passes their descriptors on to its fork and
never reads them. Input is sealed, and no process waits for a pipe that another one holds open.
"""

import asyncio
import fcntl
import json
import logging
import os
import platform
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.cgroup import Cgroup, UsageWatch
from penstock.workers.sandbox.execution import CPU_SLACK_S, Ending, Limits
from penstock.workers.sandbox.fence import DEVICES, ETC, FencePrograms, WorkspaceView, command, seccomp_program

_LOG = logging.getLogger("penstock")
START_S = 30.0
"""Seconds for a fence to stand and its interpreter to be ready; takes 50 ms on an idle machine."""
STARTS = 3
"""Times that a fence is started which is killed meanwhile."""
GRACE_S = 2.0
"""Seconds after the deadline before the fence is taken down. The keeper itself ends what is late, and reports it."""
END_S = 5.0
"""Seconds for the processes of a fence that is taken down to be gone."""
WATCH_S = 0.05
"""Seconds between looks at what no other limit bounds: processor time, and without a cgroup memory."""
CREDENTIALS = struct.Struct("3i")
KEEPER = Path(__file__).with_name("inside.py")
WORKSPACE_KEEPER = Path(__file__).with_name("inside_workspace.py")
LOST: dict[str, Any] = {"status": signal.SIGKILL, "cpu_s": 0.0, "seconds": 0.0, "lost": True}
"""Facts on an execution whose end the keeper does not report."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


Worker = TypeVar("Worker", bound="FenceWorker")


class FenceKilled(SandboxUnavailable):
    """A fence that ended without a word before it ran code of a model, as one does that the kernel kills where memory
    is short."""


async def standing(start: Callable[[], Awaitable[Worker]]) -> Worker:
    """Start a fence, up to `STARTS` times if it is killed meanwhile. Raises `SandboxUnavailable`."""
    for _ in range(STARTS - 1):
        with suppress(FenceKilled):
            return await start()
    return await start()


class FenceWorker:
    """A fence that stands ready.

        worker = await FenceWorker.start(machine, limits)
        ending = await worker.execute({"source": "print(1)"}, b"")
        worker.close()

    One execution at a time. If `execute` is cancelled, or its ending is `lost`, the worker is of no use any more. The
    fence ends with the thread that started it, however that ends.
    """

    grace_s = GRACE_S
    ends_with_memory = True
    """True: an execution that runs out of memory ends the fence, as the kernel may free the memory late."""
    allowed: frozenset[str] = frozenset()
    """Names of calls that `probe.py` tries and that this fence's filter allows."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, limits: Limits) -> None:
        self.process, self.control, self.limits = process, control, limits
        self.keeper = 0
        """Process id of the program inside, as seen from here."""
        self.keeper_uid = -1
        self.handle = -1
        """Descriptor of the keeper, which cannot come to mean another process."""
        self.cgroup: Cgroup | None = None
        self.without_cgroup = ""
        """The reason why there is no control group."""
        self.num_executions = 0
        self.view: WorkspaceView | None = None
        self._readiness: asyncio.Future[None] | None = None
        """Future that is resolved when the keeper sends something; `execute` waits for it."""
        self.is_open = True

    @classmethod
    async def start(
        cls,
        machine: FencePrograms,
        limits: Limits,
        rehearse: bool = True,
        view: WorkspaceView | None = None,
        kind: str = "",
    ) -> Self:
        """Start a fence. Raises `SandboxUnavailable` (or `FenceKilled`) if it does not stand. `rehearse`: run once what
        executions run, which is worth its time from about the third execution. `view`, `kind`: of a workspace
        (`workspace.py`)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with ExitStack() as files:
            files.enter_context(theirs)
            stderr = memory_file(files)
            program = seccomp_program(platform.machine(), keeper=True, workspace=view is not None)
            filter_file = memory_file(files, program, sealed=True)
            etc = [memory_file(files, text.encode(), sealed=True) for text in ETC.values()] if view else []
            options = _options(theirs.fileno(), limits, rehearse, view, kind)
            words = command(machine, _inner(options), filter_file, view, etc)
            inherited = [theirs.fileno(), filter_file, *etc]
            try:
                process = _spawned(words, inherited, stderr)
            except OSError as error:
                ours.close()
                raise SandboxUnavailable(_help(f"{words[0]}: {error.strerror}")) from None
            theirs.close()
            worker = cls(process, ours, limits)
            worker.view = view
            try:
                await worker._handshake()
            except (OSError, TimeoutError) as error:
                worker.close()
                said = os.pread(stderr, 1000, 0).decode(errors="replace").strip()
                failure = SandboxUnavailable if said or isinstance(error, TimeoutError) else FenceKilled
                raise failure(_help(said or f"{type(error).__name__} {error}")) from None
            except BaseException:
                worker.close()
                raise
        return worker

    @property
    def limits_inside(self) -> Limits:
        """Limits as a process inside finds them."""
        return self.limits

    @property
    def enforced(self) -> str:
        """A text that says which limits hold here beside those of each process."""
        if self.cgroup is None:
            return (
                f"no control group ({self.without_cgroup}): memory and processor time of an execution are looked at "
                f"every {WATCH_S * 1000:.0f} ms, and no shared memory without a file is given"
            )
        cpu = "and processor time" if self.cgroup.cpu_s() is not None else "(processor time is looked at)"
        return f"a control group of version {self.cgroup.version} holds memory and processes {cpu} of an execution"

    async def execute(self, request: dict[str, Any], stdin: bytes, wall_s: float | None = None) -> Ending:
        """Run what `inside.Keeper.run` understands, for `wall_s` at most (default: the limits')."""
        with ExitStack() as files:
            return await self.execute_with(files, request, memory_file(files, stdin, sealed=True), wall_s)

    async def execute_with(
        self, files: ExitStack, request: dict[str, Any], typed: int, wall_s: float | None = None, answer: int = -1
    ) -> Ending:
        """Do the same with a file as input, and with one for the answer, if it is given. `files`: closes what is
        opened."""
        wall_s = self.limits.wall_s if wall_s is None else min(wall_s, self.limits.wall_s)
        self.num_executions += 1
        meter = UsageMeter(self.keeper, self.cgroup)
        started = time.perf_counter()
        outputs = [memory_file(files), memory_file(files), answer if answer >= 0 else memory_file(files)]
        asked = memory_file(files, json.dumps(request).encode(), sealed=True)
        is_over = False
        passed = [typed, outputs[0], outputs[1], asked, outputs[2]]
        try:
            socket.send_fds(self.control, [repr(wall_s).encode()], passed)
            facts, is_over = await self.ended(wall_s + self.grace_s, meter)
        except (OSError, TimeoutError) as error:
            facts = LOST | {"in_time": not isinstance(error, TimeoutError)}
        facts["seconds"] = facts["seconds"] or time.perf_counter() - started
        facts["cpu_s"] = max(facts["cpu_s"], meter.cpu_s())
        out_of_memory = is_over or meter.was_killed()
        texts = [os.pread(file, self.limits.output_bytes + 1, 0) for file in outputs]
        if facts.pop("is_spent", False) or facts.get("lost") or (out_of_memory and self.ends_with_memory):
            self.close()
        return Ending(**facts, out_of_memory=out_of_memory, stdout=texts[0], stderr=texts[1], answer=texts[2])

    def close(self) -> None:
        """Take the fence down, with all that is in it. May be called twice; waits for its processes up to `END_S`."""
        if self._cut_off():
            self.remove()

    def _cut_off(self) -> bool:
        """Have the kernel end all that is in the fence. Returns False if that was done before."""
        if not self.is_open:
            return False
        self.is_open = False
        if self._readiness is not None and not self._readiness.done():
            self._readiness.get_loop().remove_reader(self.control)
            self._readiness.set_exception(ConnectionError("the fence is taken down"))
        self.control.close()  # at this the keeper ends, and what it runs with it
        if self.handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            os.close(self.handle)
        return True

    def remove(self) -> None:
        """Wait until the processes are gone, and remove their control group."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S if self.keeper else 0.2)
        if self.process.returncode is None:
            self.process.kill()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                _LOG.warning("sandbox: process %d of a fence does not end, though it was killed", self.process.pid)
        if self.cgroup is not None:
            self.cgroup.remove()

    async def _handshake(self) -> None:
        """Wait until the keeper is ready, learn its process id, and put it in a cgroup before it runs anything."""
        async with asyncio.timeout(START_S):
            await self._readable()
        message, ancillary, _, _ = self.control.recvmsg(64, socket.CMSG_SPACE(CREDENTIALS.size))
        if message != b"ready":
            raise ConnectionError("the program inside ended")
        self.keeper, self.keeper_uid, _ = CREDENTIALS.unpack(ancillary[0][2])
        self.handle = os.pidfd_open(self.keeper)
        await self._join_cgroup()
        if self.limits.require_cgroup and (lack := self._lack()):
            raise SandboxUnavailable(
                f"sandbox.require_cgroup=true: {lack}, so none of it runs. docs/sandbox.md says how to be given one; "
                f"without this key memory and processor time are looked at every {WATCH_S * 1000:.0f} ms where no "
                "group holds them."
            )
        self.control.send(b"counted" if self.cgroup is not None else b"uncounted")

    async def _join_cgroup(self) -> None:
        """Make the control group in a thread, as systemd may take its time. Whoever is cancelled waits for it, so that
        the group is removed with the fence."""
        making = asyncio.create_task(asyncio.to_thread(Cgroup.around, self.keeper, self.limits))
        try:
            await asyncio.wait([making])
        except asyncio.CancelledError:
            await asyncio.wait([making])
            raise
        finally:
            if making.done():
                try:
                    self.cgroup = making.result()
                except OSError as error:
                    self.without_cgroup = str(error)

    def _lack(self) -> str:
        """A text that says what keeps a control group from bounding memory and counting processor time; empty for
        nothing."""
        if self.cgroup is None:
            return f"there is no control group for code of a model here ({self.without_cgroup})"
        if self.cgroup.cpu_s() is None:
            return (
                "the control group for code of a model counts no processor time here (version 1, and no group of "
                "cpuacct may be made)"
            )
        return ""

    async def ended(self, deadline_s: float, meter: "UsageMeter") -> tuple[dict[str, Any], bool]:
        """Return the keeper's report, and whether memory ran out meanwhile. Raises `TimeoutError` or
        `ConnectionError`."""
        deadline = time.monotonic() + deadline_s
        most_s = -int(-self.limits.cpu_s // 1) + CPU_SLACK_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._readable()
                return self._report(), False
            if meter.was_killed() or meter.memory_bytes() > self.limits.memory_bytes:  # who is left is not waited for
                return LOST | {"in_time": True}, True
            if meter.cpu_s() > most_s:  # of several processes; one alone is ended by the kernel, and its fence stays
                return LOST | {"in_time": True}, False
        with suppress(BlockingIOError):  # said in time, while this loop was busy
            return self._report(), False
        raise TimeoutError

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = self._readiness = loop.create_future()
        loop.add_reader(self.control, _resolve, readable)
        try:
            await readable
        finally:
            if self.is_open:
                loop.remove_reader(self.control)

    def _report(self) -> dict[str, Any]:
        message = self.control.recv(4096)
        if not message:
            raise ConnectionError("the program inside ended")
        facts: dict[str, Any] = json.loads(message)
        return facts


class UsageMeter:
    """The usage of one execution so far: counted by its cgroup, or else seen by a watch."""

    def __init__(self, keeper: int, cgroup: Cgroup | None) -> None:
        self._cgroup = cgroup
        self._watch = UsageWatch(keeper)
        self._killed = cgroup.num_killed() if cgroup else 0
        self._before_s = cgroup.cpu_s() if cgroup else None

    def memory_bytes(self) -> int:
        """Bytes of its processes now. With a cgroup no look is needed, and this is 0; if the group does not count
        processor time, a look is taken for that."""
        if self._before_s is not None:
            return 0
        seen = self._watch.look()
        return 0 if self._cgroup else seen

    def cpu_s(self) -> float:
        now = self._cgroup.cpu_s() if self._cgroup and self._before_s is not None else None
        return self._watch.cpu_s if now is None or self._before_s is None else now - self._before_s

    def was_killed(self) -> bool:
        """Return whether the kernel ended a process for its memory."""
        return self._cgroup is not None and self._cgroup.num_killed() > self._killed


def _spawned(words: list[str], inherited: list[int], stderr: int) -> "subprocess.Popen[bytes]":
    """Start the process in this process's own group: a signal that kills the group ends the fence."""
    return subprocess.Popen(
        words, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env={}, cwd="/"
    )


def _inner(options: dict[str, Any]) -> list[str]:
    """Arguments of the interpreter inside: isolated from its environment, without packages."""
    return ["-I", "-S", "-B", "-X", "utf8", "-c", KEEPER.read_text(), json.dumps(options)]


def _options(control: int, limits: Limits, rehearse: bool, view: WorkspaceView | None, kind: str) -> dict[str, Any]:
    machine, is_workspace = platform.machine(), view is not None
    programs = {
        name: seccomp_program(machine, keeper=False, is_counted=name == "counted", workspace=is_workspace).hex()
        for name in ("counted", "uncounted")
    }
    options: dict[str, Any] = {
        "control": control, "limits": asdict(limits), "programs": programs, "devices": DEVICES, "rehearse": rehearse,
    }  # fmt: skip
    if view is not None:
        options["workspace"] = {
            "source": WORKSPACE_KEEPER.read_text(),
            "at": view.at,
            "start": view.start,
            "kind": kind,
            "on_disk": view.changes is not None,
        }
    return options


def memory_file(files: ExitStack, content: bytes = b"", sealed: bool = False) -> int:
    """Make a file in memory, closed with `files`."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, descriptor)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _help(said: str) -> str:
    if said.startswith("its tree"):
        return (
            f"workspace: {said[:500]}. Give it more (tmp_bytes and tmp_files of its limits, or room on its disk), or a "
            "kernel that has overlayfs in memory (6.6), which copies only what is changed."
        )
    if "mount proc" in said:
        return (
            f"sandbox: a workspace has a /proc of its own, which cannot be mounted here: {said[:500]}. The kernel "
            "refuses it where this container's /proc is covered in parts. Start it with Docker's `--security-opt "
            "systempaths=unconfined`, or with `procMount: Unmasked` of Kubernetes (docs/sandbox.md)."
        )
    return (
        f"sandbox: the fence for code of a model cannot be built here, so none of it runs: {said[:500]}. It takes user "
        "namespaces. Is kernel.unprivileged_userns_clone or user.max_user_namespaces 0, or does AppArmor "
        "(kernel.apparmor_restrict_unprivileged_userns) or the container's own seccomp profile forbid them? Allow them "
        "for this machine or container (docs/sandbox.md says how)."
    )
