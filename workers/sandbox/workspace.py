"""Workspaces: trees of files in which commands run one after the other, behind the sandbox's fence, with state.

    archive or directory ─▶ OriginalTree ─▶ Workspace (a fence of its own, and memory or disk for changes)
                                                │ snapshot: what was changed      ▲ restore
                                                └─────────────▶ Snapshot ─────────┴─▶ fork, check: new workspaces

A fork costs what was changed, not the tree. Tests run in a clean fork, which no process of the agent's has touched, and
with the original's configuration of tests (`PROTECTED`). Code under test still shares a process with its tests.
docs/sandbox.md says what that means.
"""

import asyncio
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from penstock.conf.errors import ConfigError, NotStarted, WorkspaceError
from penstock.workers.runtime.async_tasks import cancel_all, time_limit_paused
from penstock.workers.sandbox.disk import DiskChanges, prepare, unnamed_file
from penstock.workers.sandbox.execution import MIB, Ending, Limits, ProgramOutcome, outcome_of
from penstock.workers.sandbox.fence import UID, FencePrograms, WorkspaceView
from penstock.workers.sandbox.original_tree import OriginalTree
from penstock.workers.sandbox.relay import reaching
from penstock.workers.sandbox.sandbox import Sandbox, check
from penstock.workers.sandbox.sandbox_worker import memory_file, standing
from penstock.workers.sandbox.workspace_worker import CLOSE_S, IDLE_S, WorkspaceWorker


@dataclass(frozen=True)
class WorkspaceLimits(Limits):
    """Limits of a workspace, for what tells them from those of the sandbox's executions."""


LIMITS = WorkspaceLimits(
    cpu_s=600.0, wall_s=600.0, memory_bytes=2048 * MIB, num_processes=256, file_bytes=512 * MIB, tmp_bytes=1024 * MIB,
    tmp_files=200_000,
)  # fmt: skip
"""Limits of a workspace: those of each command, and `tmp_bytes` and `tmp_files` of all that is changed in its tree and
/tmp. Enough for the tests of most repositories. Memory holds what is changed, too."""
PROTECTED = (
    *("conftest.py", "conftest", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("setup.cfg", "tox.ini", "sitecustomize.py", "sitecustomize", "usercustomize.py", "usercustomize", "*.pth"),
    *("*.egg-link", "*.egg-info", "*.dist-info", "__pycache__", "*.pyc", ".git"),
)
"""Names of files and directories that a check takes from the original tree, whatever was changed: what configures
pytest or is imported unasked, plugins of packages, compiled files in place of sources, and Git's."""
SHELL = """
[ -f "$1" ] && . "$1" 2>/dev/null
trap '{ declare -p; declare -f; printf "cd -- %q\\n" "$PWD"; } > "$1" 2>/dev/null' EXIT
eval "$2"
"""
"""What a command of a shell runs in, with the file of the shell's state and the command as arguments."""
BASH = "/bin/bash"
ROOT = "/rootfs"
"""Place in the fence of a tree that is a whole file system."""
PATH_OF_IMAGES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLES = {
    "HOME": "/tmp", "TMPDIR": "/tmp", "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
"""Variables of commands. Python takes a compiled file for that of a source which has its size and its second, so that
what is changed at once would not be run; none is written."""
KINDS = {"overlay": "workspaces by overlayfs", "copy": "workspaces by full copies in memory (no overlayfs here)"}
KEPT_TREES = 8
"""Trees that an actor keeps unpacked for later attempts, though no workspace has them: those of a few groups."""
FILE_BYTES = 2048
"""Bytes of the kernel's own for a file in memory below overlayfs; 1,880 were measured."""
OWN_S = 120.0
"""Deadline of a request about the tree itself, in seconds."""


class WorkspaceOptions(TypedDict, total=False):
    """Further arguments of `Workspaces.open` and `ctx.workspace`.

    `at`: the tree's directory inside; /workspace. `root`: the tree is a whole file system, such as an image's, which
    commands have instead of this machine's programs, and start at `at` in it; /. `show`: paths of this machine that
    commands may read at their own places, such as an environment with the tree's dependencies. `links`: symbolic links
    at other places, such as {"/logs": "/tmp/logs"}. `variables`: of commands' environment, besides PATH, HOME and the
    like. `limits`: `LIMITS`. `disk`: a directory of this machine's below which changes are kept instead of in memory.
    """

    at: str
    root: bool
    show: Sequence[str | os.PathLike[str]]
    links: Mapping[str, str] | None
    variables: Mapping[str, str] | None
    limits: Limits | None
    disk: str | os.PathLike[str] | None


@dataclass(frozen=True)
class WorkspaceSpec:
    """What the fork of a workspace has in common with it."""

    tree: OriginalTree
    view: WorkspaceView
    limits: Limits
    variables: Mapping[str, str] = field(compare=False)
    """Environment of commands."""
    disk: Path | None = None
    """Place for what is changed; None: memory."""

    @classmethod
    def of(cls, tree: OriginalTree, machine: FencePrograms, options: WorkspaceOptions) -> "WorkspaceSpec":
        """Raises `ConfigError`."""
        is_root, limits = options.get("root", False), options.get("limits") or LIMITS
        at = options.get("at", "/" if is_root else "/workspace")
        disk = Path(os.path.realpath(named)) if (named := options.get("disk")) is not None else None
        if disk is None and limits.memory_bytes <= limits.tmp_bytes + limits.tmp_files * FILE_BYTES:
            raise ConfigError(
                f"workspace: memory_bytes={limits.memory_bytes:,} holds what is changed, too: tmp_bytes="
                f"{limits.tmp_bytes:,}, and {FILE_BYTES} bytes for each of tmp_files={limits.tmp_files:,}. Allow less, "
                "give more, or name a disk."
            )
        if is_root and (options.get("show") or options.get("links")):
            raise ConfigError("workspace: root=True shows nothing else: put into the tree what show and links are for.")
        if not os.path.isabs(at) or (at == "/" and not is_root) or at == "/tmp" or os.path.normpath(at) != at:
            raise ConfigError(f"workspace: at={at!r} is no absolute path of a directory other than / and /tmp.")
        shown = tuple(Path(os.path.realpath(path)) for path in options.get("show", ()))
        for path in shown:
            if not path.exists() or any(path.is_relative_to(place) for place in ("/tmp", at, "/proc")):
                raise ConfigError(
                    f"workspace: show={path} is not there, or lies below /tmp, /proc or {at}, where a workspace has "
                    "files of its own. Show a path that lies elsewhere."
                )
            if disk is not None and disk.is_relative_to(path):
                raise ConfigError(
                    f"workspace: disk={disk} lies below show={path}, where commands may read all changes."
                )
        search = PATH_OF_IMAGES if is_root else f"{machine.prefix}/bin:/usr/bin:/bin"
        variables = {"PATH": search, **VARIABLES, **(options.get("variables") or {})}
        links = tuple((options.get("links") or {}).items())
        place, start = (ROOT, at) if is_root else (at, "")
        return cls(tree, WorkspaceView(tree.path, place, start, shown, links), limits, variables, disk)


class Snapshot:
    """What was changed in a workspace's tree and /tmp at one time, in memory or on its disk; freed with the object."""

    def __init__(self, disk: Path | None = None) -> None:
        self.file = os.memfd_create("snapshot", os.MFD_CLOEXEC) if disk is None else unnamed_file(disk)
        self.is_on_disk = disk is not None
        weakref.finalize(self, os.close, self.file)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.file).st_size

    def copied(self) -> "Snapshot":
        """A copy, whose memory is counted as this process's and not as that of the fence which has written this."""
        if self.is_on_disk:
            return self
        copy, size, offset = Snapshot(), self.num_bytes, 0
        while offset < size:
            if not (count := os.sendfile(copy.file, self.file, offset, size - offset)):
                raise OSError(f"workspace: its changes were {size} bytes and are {offset}")
            offset += count
        return copy


class Workspace:
    """A tree of files and the commands in it, one at a time. Made by `Workspaces.open`, and by `fork`.

        outcome = await ws.run("python -m pytest -q", timeout_s=60)   # a ProgramOutcome
        await ws.write("fix.py", "x = 1\\n")
        print(await ws.diff())
        outcome = await ws.check("python -m pytest -q", files={"tests/test_fix.py": hidden})

    Nothing of a command outlives it but files: processes in the background end with it. All requests raise
    `InfrastructureError` if the fence is lost, and `SandboxUnavailable` where there can be none.
    """

    def __init__(self, host: "Workspaces", spec: WorkspaceSpec, worker: WorkspaceWorker) -> None:
        self._host, self._spec, self.worker = host, spec, worker
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = True

    async def __aenter__(self) -> "Workspace":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        with time_limit_paused():
            await self.worker.closed()

    @property
    def kind(self) -> str:
        """Kind of the tree: "overlay" (overlayfs), "copy" (a full copy), or on a disk "reflink" (a copy whose files
        share blocks with the original ones)."""
        return self.worker.kind

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        stdin: str | bytes = b"",
        *,
        reach: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> ProgramOutcome:
        """Run a command of `sh` in the tree's directory. `timeout_s`: below the limits'. `reach`: a URL, such as
        `ctx.base_url`, whose host alone this command reaches, at 127.0.0.1 and the URL's port. `variables`: of its
        environment, besides the workspace's. Raises `ConfigError`, `WorkspaceError` for a `reach` that cannot be."""
        return await self._run(["/bin/sh", "-c", command], timeout_s, stdin, reach, variables)

    def shell(self, name: str = "main") -> "Shell":
        """A shell (bash) that keeps directory, variables and functions from command to command. A fork's shell of the
        same name begins with them."""
        return Shell(self, name)

    async def read(self, path: str) -> bytes:
        """Bytes of a file, `output_bytes` of the limits at most. Raises `WorkspaceError`."""
        return (await self._own({"do": "read", "path": path})).answer

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file, and make the directories above it. Raises `WorkspaceError`."""
        await self._own({"do": "write", "path": path}, _bytes(content))

    async def diff(self) -> str:
        """What was changed in the tree, as `git diff` writes it, without `.git`. Raises `WorkspaceError` if it is
        longer than `output_bytes` of the limits."""
        return (await self._own({"do": "diff"})).answer.decode(errors="surrogateescape")

    async def snapshot(self) -> Snapshot:
        """Keep what was changed. Raises `WorkspaceError`."""
        packed = Snapshot(self._spec.disk)
        await self._own({"do": "pack"}, answer=packed.file)
        return await asyncio.to_thread(packed.copied)

    async def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this workspace or of another one of the same tree. Raises `WorkspaceError`."""
        async with self._lock:
            await self.worker.reset()
        await self._own({"do": "apply"}, snapshot)

    async def fork(self) -> "Workspace":
        """A new workspace in the same state, to be closed by the caller. It costs what was changed. Raises
        `WorkspaceError`."""
        return await self._host.opened(self._spec, {"do": "apply"}, await self.snapshot())

    async def check(
        self,
        command: str,
        files: Mapping[str, str | bytes | None] | None = None,
        timeout_s: float | None = None,
        stdin: str | bytes = b"",
        protected: Sequence[str] = PROTECTED,
    ) -> ProgramOutcome:
        """Run a command in a clean fork: the original tree with what was changed, with `protected` from the original,
        an empty /tmp, and `files` (None: removed), whatever was changed there. Changes that cannot be applied, or
        leave no room for `files`, are an outcome, too, with the reason "changes". Raises `WorkspaceError` for files
        that lie beyond a link of the original that leads out."""
        start = self._spec.view.start
        hidden = {
            os.path.normpath(os.path.join(start, path)).removeprefix(start and "/"): content
            for path, content in (files or {}).items()
        }
        request = {"do": "apply", "protected": [*protected, *(f"./{path}" for path in hidden)]}
        tree = os.path.realpath(self._spec.tree.path)
        for path in hidden:
            if not Path(os.path.realpath(f"{tree}/{os.path.dirname(path)}")).is_relative_to(tree):
                raise WorkspaceError(f"workspace: {path} lies outside of the original tree")
        try:
            async with await self._host.opened(self._spec, request, await self.snapshot()) as fork:
                for path, content in hidden.items():
                    place = {"do": "place", "path": path, "is_removed": content is None}
                    await fork._own(place, _bytes(content or b""))
                return await fork.run(command, timeout_s, stdin)
        except WorkspaceError as error:
            return ProgramOutcome("", str(error), 1, 0.0, 0.0, "changes")

    def close(self) -> None:
        """End the workspace and all that runs in it, without waiting. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        self.worker.close()
        if self._is_open:
            self._is_open = False
            self._host.release(self._spec)

    async def _run(
        self,
        words: list[str],
        timeout_s: float | None,
        stdin: str | bytes,
        reach: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> ProgramOutcome:
        request = {"do": "run", "words": words, "environment": {**self._spec.variables, **(variables or {})}}
        ending = await self._execute(request, _bytes(stdin), timeout_s, reach=reach)
        return outcome_of(ending, self._spec.limits)

    async def _own(self, request: dict[str, Any], content: bytes | Snapshot = b"", answer: int = -1) -> Ending:
        """Make a request about the tree itself. Raises `WorkspaceError`."""
        ending = await self._execute(request, content, OWN_S, answer)
        what = f"workspace: {request['do']} {request.get('path', '')}".rstrip()
        outcome = outcome_of(ending, self._spec.limits)
        if outcome.exit_code != 0 or outcome.reason == "disk":
            said = ending.stderr[-500:].decode(errors="replace").strip()
            raise WorkspaceError(f"{what}: {said or f'ended by a limit ({outcome.reason})'}")
        if answer < 0 and len(ending.answer) > self._spec.limits.output_bytes:
            raise WorkspaceError(f"{what}: more than {self._spec.limits.output_bytes:,} bytes (Limits.output_bytes)")
        return ending

    async def _execute(
        self,
        request: dict[str, Any],
        content: bytes | Snapshot,
        timeout_s: float | None,
        answer: int = -1,
        reach: str = "",
    ) -> Ending:
        # What reaches others waits for them most of its time, and takes no place.
        async with self._lock, nullcontext() if reach else self._host.place():
            if self._timer is not None:
                self._timer.cancel()
            try:
                with ExitStack() as files:
                    if isinstance(content, Snapshot):
                        typed = os.open(f"/proc/self/fd/{content.file}", os.O_RDONLY | os.O_CLOEXEC)
                        files.callback(os.close, typed)
                    else:
                        typed = memory_file(files, content, sealed=True)
                    async with reaching(self.worker, reach) if reach else nullcontext():
                        return await self.worker.execute_with(files, request, typed, timeout_s, answer)
            finally:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.worker.rest)


class Shell:
    """A shell of a workspace. Its state is a file in the workspace's /tmp."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self._workspace, self._state = workspace, f"/tmp/.shell-{name}"

    async def run(self, command: str, timeout_s: float | None = None, stdin: str | bytes = b"") -> ProgramOutcome:
        """Run a command where the last one has ended. One that is ended by a limit leaves the state as it was."""
        words = [BASH, "--norc", "-c", SHELL, "bash", self._state, command]
        return await self._workspace._run(words, timeout_s, stdin)


class Workspaces:
    """The workspaces of one event loop. `close` ends them all; so does the end of the thread.

        workspaces = Workspaces()
        async with workspaces.open("repository.tar.gz") as ws:
            print((await ws.run("ls")).stdout)
        await workspaces.close()

    As many commands run at once as `num_at_once` says; others wait, while their caller's own time stands still. A fence
    that stands by makes forks quick. Before anything runs, a program tries the fence from inside.
    """

    def __init__(self, num_at_once: int | None = None, machine: FencePrograms | None = None) -> None:
        """`num_at_once`: commands at once, by default one a core. `machine`: for tests."""
        self._places = asyncio.Semaphore(num_at_once or os.cpu_count() or 1)
        self._machine = machine
        self._trees: dict[Path, asyncio.Task[OriginalTree]] = {}
        """The `KEPT_TREES` that were asked for last, by their sources."""
        self._opened: weakref.WeakSet[OriginalTree] = weakref.WeakSet()
        self._workers: weakref.WeakSet[WorkspaceWorker] = weakref.WeakSet()
        """Fences, the closed ones as long as a thread waits for their end."""
        self._changes: weakref.WeakSet[DiskChanges] = weakref.WeakSet()
        self._users: Counter[WorkspaceSpec] = Counter()
        self._standby: dict[WorkspaceSpec, asyncio.Task[WorkspaceWorker]] = {}
        self._checked: set[bool] = set()
        self._starting = asyncio.Lock()
        self._is_closed = False
        self.first_kind = "overlay"
        """Kind of trees that is tried first."""

    @asynccontextmanager
    async def open(
        self, source: str | os.PathLike[str], **options: Unpack[WorkspaceOptions]
    ) -> AsyncIterator[Workspace]:
        """Open a workspace with a tree: a directory or an archive. Raises `ConfigError`, `SandboxUnavailable`."""
        if self._is_closed:
            raise NotStarted("Workspaces: they are closed. Make others.")
        machine = self._machine = self._machine or FencePrograms.here()
        with time_limit_paused():
            tree = await self._tree(Path(source), None if machine.setpriv is None else UID)
            spec = WorkspaceSpec.of(tree, machine, options)
            if spec.disk is not None:
                await asyncio.to_thread(prepare, spec.disk)
        async with await self.opened(spec) as workspace:
            yield workspace

    async def opened(
        self, spec: WorkspaceSpec, request: dict[str, Any] | None = None, snapshot: Snapshot | None = None
    ) -> Workspace:
        """Make a workspace, and apply a snapshot as the request says."""
        with time_limit_paused():
            worker = await self._worker(spec)
        workspace = Workspace(self, spec, worker)
        self._users[spec] += 1
        try:
            if request is not None and snapshot is not None:
                await workspace._own(request, snapshot)
        except BaseException:
            workspace.close()
            raise
        return workspace

    async def close(self) -> None:
        """End all workspaces, and give their trees up. What does not end in time is logged."""
        self._is_closed = True
        await cancel_all(self._standby.values())
        await asyncio.gather(*(worker.closed() for worker in self._workers))
        if self._trees:
            await asyncio.wait(self._trees.values(), timeout=CLOSE_S)
        for tree in list(self._opened):
            await asyncio.to_thread(tree.close)
        for changes in list(self._changes):
            await asyncio.to_thread(changes.remove)

    def release(self, spec: WorkspaceSpec) -> None:
        """Note that a workspace is closed. No fence stands by for forks of the last one."""
        self._users[spec] -= 1
        if self._users[spec] == 0:
            del self._users[spec]
            if (task := self._standby.pop(spec, None)) is not None:
                _discard(task)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one of the places for commands."""
        with time_limit_paused():
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def _tree(self, source: Path, owner: int | None) -> OriginalTree:
        """The tree, read once: a source that changes meanwhile does not change the workspaces of later attempts."""
        task = self._trees.pop(source, None)
        if task is None or _has_failed(task):
            task = asyncio.create_task(asyncio.to_thread(OriginalTree.of, source, owner))
            task.add_done_callback(lambda task: None if _has_failed(task) else self._opened.add(task.result()))
        self._trees[source] = task
        for oldest in list(self._trees)[:-KEPT_TREES]:
            del self._trees[oldest]
        return await asyncio.shield(task)

    async def _worker(self, spec: WorkspaceSpec) -> WorkspaceWorker:
        """The fence that stands by, or a new one; and start the next."""
        task = self._standby.pop(spec, None)
        if task is None or _has_failed(task):
            task = asyncio.create_task(standing(lambda: self._started(spec)))
        try:
            worker = await asyncio.shield(task)
        except BaseException:
            _discard(task)
            raise
        if not self._is_closed and spec not in self._standby:
            self._standby[spec] = asyncio.create_task(standing(lambda: self._started(spec)))
        return worker

    async def _started(self, spec: WorkspaceSpec) -> WorkspaceWorker:
        machine = self._machine
        assert machine is not None
        view = spec.view
        if spec.disk is not None:
            changes = DiskChanges(spec.disk, None if machine.setpriv is None else UID)
            self._changes.add(changes)
            view = replace(view, changes=changes)
        worker = await WorkspaceWorker.start(machine, spec.limits, False, view, self.first_kind)
        self._workers.add(worker)
        try:
            async with self._starting:
                if (has_cgroup := worker.cgroup is not None) not in self._checked:
                    await check(worker, machine)
                    self._checked.add(has_cgroup)
        except BaseException:
            worker.close()
            raise
        return worker


def checked_here(all_limits: Iterable[Limits]) -> str:
    """A text that says what holds on this machine, once fences with each of these limits have been started, tried from
    inside and closed. Raises `SandboxUnavailable`."""
    enforced = [asyncio.run(_tried(limits)) for limits in all_limits]
    return f"tried from inside, and no hole found; {'; '.join(dict.fromkeys(enforced))}"


async def _tried(limits: Limits) -> str:
    if not isinstance(limits, WorkspaceLimits):
        async with Sandbox(limits, num_workers=1) as sandbox:
            return sandbox.enforced
    workspaces = Workspaces()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-") as empty:
            async with workspaces.open(empty, limits=limits) as ws:
                return f"{KINDS[ws.kind]}; {ws.worker.enforced}"
    finally:
        await workspaces.close()


def _has_failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _discard(task: "asyncio.Task[WorkspaceWorker]") -> None:
    """Close a fence that nobody takes, now or when it stands."""
    task.cancel()
    task.add_done_callback(lambda task: None if _has_failed(task) else task.result().close())


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="surrogateescape") if isinstance(content, str) else content
