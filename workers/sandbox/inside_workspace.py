"""The program that keeps a workspace's fence, and what runs behind it: process 1, which forks for each command.

It is `inside.py` with a tree that stays. What was changed is in one tmpfs, mounted once, or in a directory of a disk:

    /changes/upper ─┐                                /changes/tmp ─▶ /tmp
    /original ──────┴─ overlayfs ─▶ the workspace    (where there is no overlayfs, upper is a full copy)

Then /changes is taken away; on a disk it is covered, as a reset mounts again and overlayfs wants a mount that is there.
Only the keeper has a descriptor of upper. A command is process 1 of a PID namespace of its own, with a /proc of that.
Other requests read or write the tree for the worker, as unprivileged as a command. They speak of changes, one after the
other in a file: a line of JSON, and for a file its bytes. Changes are applied by ordinary calls, so that they mean the
same with overlayfs and with a copy.

While nothing is asked for, the worker has this program replace itself with a shell that waits (`rest`). Mounts stay, as
they belong to the process.
"""

import _socket
import fcntl
import filecmp
import fnmatch
import glob
import itertools
import json
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO, NoReturn

from penstock.workers.sandbox.inside import (
    ANSWER,
    MNT_DETACH,
    NUM_FILES,
    REQUEST,
    Keeper,
    checked,
    fence_in,
    run_calls,
    run_main,
    take_files,
)

READ_ONLY, NO_SUID_DEVICES, NO_PROGRAMS = 1, 2 | 4, 8
BIND, RECURSIVE = 4096, 16384
LOWER, SPACE = "/original", "/changes"
MOUNTED = ("proc", "dev", "tmp")
"""Directories of a tree that is a whole file system where something else is mounted."""
OWN_UPPER = NUM_FILES
"""Descriptor of upper in a process that reads or writes the tree for the worker."""
UPPER = f"/proc/self/fd/{OWN_UPPER}"
OPAQUE = "user.overlay.opaque"
NUM_DESCRIPTORS = 1024
LISTEN, LOOPBACK, BACKLOG = b"listen ", "127.0.0.1", 64
SAME_READ_BYTES = 1 << 20
FICLONE = 0x40049409
"""The request of `ioctl` by which a file shares the blocks of another one until one of them is changed."""
RM = "/bin/rm"
LOOK_S = 0.05
"""Seconds between looks at a disk while a command runs."""
REST_OF_LOOKS = 9
"""Least time between counts of all files, in times that a count took: counting takes a tenth of a core at most, unless
the disk has lost what a command may still take."""
LEAST_FREE_BYTES = 256 << 20
"""Bytes that are left to others on a disk. A file that was removed, and is mapped or in a socket, is not counted: this
ends who fills a disk with it."""
MOST_AT_ONCE = (2 << 30, 100_000)
"""Bytes and files that a command takes between two looks, by a generous guess. A workspace with that and twice its
limits is given up: command after command would get there, each ended by its own look."""
UNCOUNTABLE, BLOCK_BYTES, OWN_SHARE = 1 << 62, 512, 64
PACKED_LINE_BYTES = 1024
"""Bytes of a change's line, by a generous guess: its path and facts."""
Change = tuple[str, str, dict[str, Any]]
"""Kind of a change ("removed", "directory", "link" or "file"), path in the tree, and facts."""


class WorkspaceKeeper(Keeper):
    """Serves the commands of one workspace, one after the other."""

    disk: "DiskMeter | None" = None
    """None: what is changed is in memory."""

    def __init__(self, control: _socket.socket, options: dict[str, Any]) -> None:
        super().__init__(control, options["limits"], options["programs"])
        self.options = options
        self.at: str = options["workspace"]["at"]
        self.start: str = options["workspace"]["start"]
        """Directory where commands start in a tree that is their whole file system; empty: it is not."""
        self.kind: str = options["workspace"]["kind"]
        self.interrupts = select.POLLIN
        self.upper: int = options["workspace"].get("upper", -1)
        self.proc = f"{self.at}/proc" if self.start else "/proc"
        """Place for the /proc of a command."""
        if options["workspace"]["on_disk"]:
            self.disk = DiskMeter(self.limits, self.at, self.proc, options["workspace"].get("counts"))

    def serve(self) -> None:
        if "counted" not in self.options:
            self.control.send(b"ready")
            self.options["counted"] = self.control.recv(64).decode()  # a control group counts what comes from here on
            if not self.options["counted"]:
                return
            self.mount_tree()
            if self.options["counted"] == "uncounted":
                checked("umount2", b"/dev/zero", MNT_DETACH)
        self.program = self.programs[self.options["counted"]]
        self.limits |= {"num_descriptors": NUM_DESCRIPTORS}
        if self.options["counted"] == "counted":  # some programs reserve more addresses than they use
            self.limits |= {"memory_bytes": -1}
        self.control.send(self.kind.encode())
        while True:
            message, ancillary, _, _ = self.control.recvmsg(64, _socket.CMSG_LEN(4 * NUM_FILES))
            if not message:
                return
            if ancillary:
                files = memoryview(ancillary[0][2]).cast("i").tolist()
                self.control.send(json.dumps(self._execute(files, float(message))).encode())
            elif message == b"reset":
                self._reset()
                self.control.send(b"reset")
            elif message == b"rest":
                self._rest()
            elif message.startswith(LISTEN):
                self._listen(int(message.removeprefix(LISTEN)))

    def _listen(self, port: int) -> None:
        """Hand the worker a socket that listens on loopback: it belongs to this network, whoever has it."""
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind((LOOPBACK, port))
            listener.listen(BACKLOG)
            descriptor = listener.fileno().to_bytes(4, sys.byteorder)
            self.control.sendmsg([b"listening"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor)])
        except OSError as error:
            self.control.send(str(error).encode())
        finally:
            listener.close()

    def _execute(self, files: list[int], wall_s: float) -> dict[str, Any]:
        started = time.perf_counter()
        before = os.stat(self.proc).st_dev
        if self.disk is not None:
            self.disk.begin(self.upper, files)
        facts = self._fork(files, wall_s)
        if self.disk is not None:
            facts |= self.disk.end()
        if os.stat(self.proc).st_dev != before:
            checked("umount2", self.proc.encode(), MNT_DETACH)
        return facts | {"seconds": time.perf_counter() - started}

    def polled(self, poll: select.poll, wall_s: float) -> list[int]:
        """Look at the disk while nothing is ready."""
        if self.disk is None:
            return super().polled(poll, wall_s)
        deadline = time.monotonic() + wall_s
        while (left_s := deadline - time.monotonic()) > 0:
            if ready := super().polled(poll, min(LOOK_S, left_s)):
                return ready
            if self.disk.is_over():
                break
        return []

    def mount_tree(self) -> None:
        if self.disk is None:
            checked("mount", b"tmpfs", SPACE.encode(), b"tmpfs", NO_SUID_DEVICES, self.tmp)
        upper, work, tmp = (f"{SPACE}/{name}" for name in ("upper", "work", "tmp"))
        for place in (upper, work, tmp):
            os.mkdir(place)
        os.chmod(upper, stat.S_IMODE(os.stat(LOWER).st_mode) | 0o700)
        options = f"lowerdir={LOWER},upperdir={upper},workdir={work},userxattr"
        options += "" if self.disk is None else ",volatile"  # to end a fence does not wait for the disk
        if self.kind == "overlay":
            try:
                # Before 6.6 memory has no such attributes. Some of these kernels mount all the same, and then cannot
                # replace a directory.
                os.setxattr(SPACE, "user.penstock", b"")
                checked("mount", b"overlay", self.at.encode(), b"overlay", NO_SUID_DEVICES, options.encode())
            except OSError:  # kernels before 5.11 mount none in a namespace
                self.kind = "copy"
        if self.kind != "overlay":
            self.kind = copied_tree(upper)
            checked("mount", upper.encode(), self.at.encode(), None, BIND, None)
        checked("mount", tmp.encode(), b"/tmp", None, BIND, None)
        self.upper = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if self.disk is None:
            checked("umount2", SPACE.encode(), MNT_DETACH)
        else:
            checked("mount", b"tmpfs", SPACE.encode(), b"tmpfs", READ_ONLY | NO_SUID_DEVICES, b"size=4k,mode=0")
            self.disk.count_tree(self.upper)
        for name in MOUNTED if self.start else ():
            place = f"{self.at}/{name}"
            if os.path.islink(place):
                raise SystemExit(f"its tree has a link at /{name}, where a directory belongs")
            os.makedirs(place, exist_ok=True)
            if name != "proc":
                checked("mount", f"/{name}".encode(), place.encode(), None, BIND | RECURSIVE, None)

    def _reset(self) -> None:
        """Forget all changes."""
        os.close(self.upper)
        for place in (self.at, "/tmp"):
            checked("umount2", place.encode(), MNT_DETACH)
        if self.disk is not None:
            checked("umount2", SPACE.encode(), MNT_DETACH)
            words = [RM, "-rf", *(f"{SPACE}/{name}" for name in ("upper", "work", "tmp"))]
            os.waitpid(os.posix_spawn(RM, words, {}), 0)
        self.mount_tree()

    def _rest(self) -> NoReturn:
        """Become a shell that waits for a line, and then this program again."""
        for number, file in enumerate((self.control.fileno(), self.upper), 3):
            os.dup2(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64), number)
        counts = self.disk.counts if self.disk is not None else None
        self.options["workspace"] |= {"kind": self.kind, "upper": 4, "counts": counts}
        options = json.dumps(self.options | {"control": 3})
        words = [*sys.orig_argv[:-1], options]
        os.execv("/bin/sh", ["sh", "-c", 'read -r line <&3 && exec "$0" "$@"', *words])

    def run(self, files: list[int]) -> int:
        request: dict[str, Any] = json.loads(os.pread(files[REQUEST], os.fstat(files[REQUEST]).st_size, 0))
        task = request.get("do", "python")
        is_code = task in ("run", "python")
        take_files(files if is_code else [*files, self.upper])
        # Where memory runs out, the kernel is to end commands and not the keeper, which has the tree. They cannot undo
        # this in a /proc that is read-only.
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"1000")
        if is_code:
            checked("mount", b"proc", self.proc.encode(), b"proc", READ_ONLY | NO_SUID_DEVICES | NO_PROGRAMS, None)
        start = self.at
        if self.start and task in ("run", "read", "write"):
            os.chroot(self.at)
            start = self.start
        fence_in(self.limits if is_code else self.limits | {"file_bytes": self._packed_bytes()}, self.program)
        os.chdir(start)
        return getattr(self, f"do_{task}")(request) or 0

    def _packed_bytes(self) -> int:
        """Largest size of a file with all changes: sparse files are longer than the memory that they take."""
        return 2 * int(self.limits["tmp_bytes"]) + PACKED_LINE_BYTES * int(self.limits["tmp_files"])

    def do_run(self, request: dict[str, Any]) -> None:
        os.set_inheritable(REQUEST, False)
        os.set_inheritable(ANSWER, False)
        os.execve(request["words"][0], request["words"], request["environment"])

    def do_python(self, request: dict[str, Any]) -> int:
        os.chdir("/tmp")  # as in the sandbox
        return run_calls(request) if "calls" in request else run_main(request["source"])

    def do_read(self, request: dict[str, Any]) -> None:
        refuse_special(request["path"])
        with open(request["path"], "rb") as source, open(ANSWER, "wb") as target:
            shutil.copyfileobj(source, target)

    def do_write(self, request: dict[str, Any]) -> None:
        os.makedirs(os.path.dirname(request["path"]) or ".", exist_ok=True)
        refuse_special(request["path"])
        with open(0, "rb") as source, open(request["path"], "wb") as target:
            shutil.copyfileobj(source, target)

    def do_pack(self, request: dict[str, Any]) -> None:
        """Write all changes of the tree and of /tmp."""
        with open(ANSWER, "wb") as target:
            for root, place, found in (("tree", UPPER, self._changes()), ("tmp", "/tmp", changes("/tmp", os.devnull))):
                for kind, path, facts in found:
                    target.write(json.dumps([root, kind, path, facts]).encode() + b"\n")
                    if kind == "file":
                        send(f"{place}/{path}", target, facts["size"])

    def do_apply(self, request: dict[str, Any]) -> None:
        """Apply changes to a workspace without any. `protected`: names and paths that stay as they are in the original
        tree; then /tmp stays empty, too."""
        protected = request.get("protected")
        replaced: list[str] = []
        with open(0, "rb") as source:
            while line := source.readline():
                root, kind, path, facts = json.loads(line)
                size = facts.get("size", 0)
                if protected is not None and (root == "tmp" or is_protected(path, protected)):
                    source.seek(size, os.SEEK_CUR)
                    continue
                if protected is not None and kind != "directory" and is_directory(f"{LOWER}/{path}"):
                    replaced.append(path)
                apply(kind, f"{self.at if root == 'tree' else '/tmp'}/{path}", facts, source)
        for original in (original for path in replaced for original in files_below(path)):
            if is_protected(original, protected or []):
                self._restore(original)

    def do_place(self, request: dict[str, Any]) -> None:
        """Write or remove a file where it lies in the original tree, through no link of the changes'."""
        path = self._real_path(request["path"])
        remove(path)
        if not request["is_removed"]:
            with open(0, "rb") as source, open(path, "xb") as target:
                shutil.copyfileobj(source, target)

    def do_diff(self, request: dict[str, Any]) -> None:
        """Write what was changed as Git writes it."""
        with open(ANSWER, "wb") as target:
            found = [change for change in self._changes() if ".git" not in change[1].split("/")]
            there = {path for kind, path, _ in found if kind in ("file", "link")}
            for kind, path, _ in found:
                for old in files_below(path) if kind != "directory" else ():
                    if old not in there:
                        target.write(difference(old, None))
                if path in there:
                    target.write(difference(path, f"{UPPER}/{path}"))

    def _changes(self) -> Iterator[Change]:
        found = changes(UPPER, LOWER, self.kind)
        return (change for change in found if not self.start or change[1] not in MOUNTED)

    def _restore(self, path: str) -> None:
        place = self._real_path(path)
        if not os.path.lexists(place):
            shutil.copy2(f"{LOWER}/{path}", place, follow_symlinks=False)

    def _real_path(self, path: str) -> str:
        """Place of a path of the original tree, below directories that are, or are made, as they are there: a link that
        leads elsewhere is replaced."""
        above, name = os.path.split(path)
        if not above:
            return f"{self.at}/{name}"
        place = self._real_path(above)
        if os.path.islink(f"{LOWER}/{above}"):
            target = os.readlink(f"{LOWER}/{above}")
            if not os.path.islink(place) or os.readlink(place) != target:
                remove(place)
                os.symlink(target, place)
            path = os.path.relpath(os.path.join(os.path.dirname(place), target, name), self.at)
            if path.startswith("../"):
                raise ValueError(f"{above} is a link to {target} in the original tree, out of it")
            return self._real_path(path)
        if not is_directory(place):
            remove(place)
            os.mkdir(place)
        return f"{place}/{name}"


class DiskMeter:
    """What is changed on a disk, in bytes and number of files, and whether a command is to be ended for it: it may have
    what the limits say, or else what it has found, and a little more that the file system itself adds.

    Lifecycle: `count_tree`; `begin`, `is_over`, `end` for each request.
    """

    def __init__(self, limits: dict[str, Any], at: str, proc: str, counts: list[list[int]] | None) -> None:
        """`at`: the workspace's directory. `proc`: place of commands' /proc. `counts`: those of an earlier keeper."""
        self.limits, self.at, self.proc = [limits["tmp_bytes"], limits["tmp_files"]], at, proc
        self.counts = counts or [[0, 0], [0, 0]]
        """Bytes and files now, and those of the tree without changes."""
        self.upper = -1
        self.others: set[tuple[int, int]] = set()
        self.due_s = 0.0
        self.taken = [0, 0]
        """Bytes and files that all had taken of the disk at the last count."""

    def count_tree(self, upper: int) -> None:
        """Count what is there before anything is changed."""
        self.upper = upper
        self.counts = [self._counted()] * 2

    def begin(self, upper: int, files: list[int]) -> None:
        """Begin to look. `files`: the request's own, which are not counted."""
        self.upper, self.others, self.was_over = upper, {key_of(os.fstat(file)) for file in files}, False
        now, tree = self.counts
        self.most = [
            max(own + own // OWN_SHARE, limit + least) for own, limit, least in zip(now, self.limits, tree, strict=True)
        ]

    def is_over(self) -> bool:
        """Look. Files are counted unless that was done a while ago, and the disk has lost less than is left since."""
        now_s, (free, *taken) = time.monotonic(), room_on_disk()
        grown = [now - before for now, before in zip(taken, self.taken, strict=True)]
        if now_s > self.due_s or self._is_more(own + more for own, more in zip(self.counts[0], grown, strict=True)):
            self.counts[0] = self._counted()
            self.taken, self.due_s = taken, time.monotonic() + REST_OF_LOOKS * (time.monotonic() - now_s)
        self.was_over = self.was_over or self._is_more(self.counts[0]) or free < LEAST_FREE_BYTES
        return self.was_over

    def end(self) -> dict[str, Any]:
        """Look for the last time; return facts for the worker."""
        if self.was_over:  # more may have come until it ended
            self.due_s = 0.0
        is_over = self.is_over()
        sizes = zip(self.counts[0], self.limits, self.counts[1], MOST_AT_ONCE, strict=True)
        return {
            "over_disk": is_over,
            "is_spent": any(now > 2 * limit + tree + most for now, limit, tree, most in sizes),
        }

    def _is_more(self, counts: Iterable[int]) -> bool:
        return any(now > most for now, most in zip(counts, self.most, strict=True))

    def _counted(self) -> list[int]:
        """Bytes and number of files of the tree and /tmp, and of those that are open and removed."""
        seen: set[tuple[int, int]] = set()
        num_bytes = num_files = 0
        tmp = os.open("/tmp", os.O_PATH | os.O_CLOEXEC)
        try:
            for found in itertools.chain(facts_below(self.upper), facts_below(tmp), self._removed_files()):
                if found.st_nlink != 1 and not stat.S_ISDIR(found.st_mode):
                    if key_of(found) in seen:
                        continue
                    seen.add(key_of(found))
                num_bytes += found.st_blocks * BLOCK_BYTES
                num_files += 1
        except OSError:  # a path that is too long, or files that are hidden
            return [UNCOUNTABLE, UNCOUNTABLE]
        finally:
            os.close(tmp)
        return [num_bytes, num_files]

    def _removed_files(self) -> Iterator[os.stat_result]:
        """Facts of files that are open and have no name. Raises `OSError` for a process that hides its files."""
        devices = {os.stat("/tmp").st_dev, os.fstat(self.upper).st_dev, os.stat(self.at).st_dev}
        for thread in glob.iglob(f"{self.proc}/[0-9]*/task/*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for found in open_files(thread):
                    if not found.st_nlink and found.st_dev in devices and key_of(found) not in self.others:
                        yield found


def open_files(thread: str) -> Iterator[os.stat_result]:
    """Facts of a thread's open files. They are refused for one that ends, and for a program that its user may not read;
    only for the latter `PermissionError` is raised."""
    try:
        for name in os.listdir(f"{thread}/fd"):
            with suppress(FileNotFoundError):
                yield os.stat(f"{thread}/fd/{name}")
    except PermissionError:
        with open(f"{thread}/statm") as file:
            if not file.read().startswith("0 "):
                raise


def facts_below(root: int) -> Iterator[os.stat_result]:
    """Facts of all that is below a directory, through no link, while others change it. Raises `OSError` for a directory
    whose path is too long."""
    ahead = ["."]
    while ahead:
        below = ahead.pop()
        try:
            directory = os.open(below, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        except (FileNotFoundError, NotADirectoryError):
            continue
        with ExitStack() as files:
            files.callback(os.close, directory)
            for entry in files.enter_context(os.scandir(directory)):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        ahead.append(f"{below}/{entry.name}")
                    yield found


def key_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def room_on_disk() -> tuple[int, int, int]:
    """Bytes of the disk that are left, and bytes and files that are taken of it, by whomever."""
    found = os.statvfs("/tmp")
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return found.f_bavail * found.f_frsize, used, found.f_files - found.f_ffree


def copied_tree(upper: str) -> str:
    """Copy the original tree. Returns "reflink" if all files share their blocks with the original ones, else "copy"."""
    kinds: set[str] = set()

    def copied(source: str, target: str) -> None:
        try:
            if "copy" in kinds:
                raise OSError("no reflinks here")
            with open(source, "rb") as old, open(target, "wb") as new:
                fcntl.ioctl(new, FICLONE, old.fileno())
            kinds.add("reflink")
        except OSError:
            kinds.add("copy")
            shutil.copyfile(source, target)
        shutil.copystat(source, target)

    try:
        shutil.copytree(LOWER, upper, symlinks=True, dirs_exist_ok=True, copy_function=copied)
    except OSError as error:
        raise SystemExit(f"its tree cannot be copied: {str(error)[-200:]}") from None
    return "reflink" if kinds == {"reflink"} else "copy"


def changes(upper: str, lower: str, kind: str = "overlay") -> Iterator[Change]:
    """What makes an original tree into another one, directories before what is in them. `upper`: of overlayfs, or a
    full copy."""
    if kind != "overlay":
        yield from missing(upper, lower)
    for place, path, found in entries_of(upper):
        original = f"{lower}/{path}"
        if stat.S_ISDIR(found.st_mode):
            is_new = not is_directory(original) or is_opaque(place)
            if is_new and os.path.lexists(original):
                yield "removed", path, {}
            if is_new or mode_of(original) != stat.S_IMODE(found.st_mode):
                yield "directory", path, {"mode": stat.S_IMODE(found.st_mode)}
        elif not is_same(place, original):
            yield from change_of(place, path, found)


def missing(tree: str, lower: str) -> Iterator[Change]:
    """What of an original tree is not in a copy."""
    for place, names, files in os.walk(lower):
        rel = os.path.relpath(place, lower)
        for name in sorted(names + files):
            if not os.path.lexists(f"{tree}/{rel}/{name}"):
                yield "removed", os.path.normpath(f"{rel}/{name}"), {}
        names[:] = [name for name in names if is_directory(f"{tree}/{rel}/{name}")]


def entries_of(root: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """All that is below a directory, directories before what is in them: its place, its path from there, and what it
    was. Directories are made readable."""
    ahead = [""]
    while ahead:
        below = ahead.pop()
        for entry in sorted(os.scandir(f"{root}/{below}"), key=lambda entry: entry.name):
            path, found = os.path.join(below, entry.name), entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                os.chmod(entry.path, found.st_mode | 0o700)
                ahead.append(path)
            yield entry.path, path, found


def change_of(place: str, path: str, found: os.stat_result) -> Iterator[Change]:
    """The change to a file or link. Pipes and sockets are processes' own, and are left out; what they replace is
    gone."""
    if stat.S_ISLNK(found.st_mode):
        yield "link", path, {"target": os.readlink(place)}
    elif stat.S_ISREG(found.st_mode):
        os.chmod(place, found.st_mode | 0o400)
        facts = {"mode": stat.S_IMODE(found.st_mode), "mtime_ns": found.st_mtime_ns, "size": found.st_size}
        yield "file", path, facts
    else:
        yield "removed", path, {}


def apply(kind: str, place: str, facts: dict[str, Any], source: BinaryIO) -> None:
    """Apply a change; the bytes of a file are next in the source."""
    if kind != "directory" or not is_directory(place):
        remove(place)
    if kind == "directory":
        os.makedirs(place, exist_ok=True)
        os.chmod(place, facts["mode"] | 0o700)
    elif kind == "link":
        os.symlink(facts["target"], place)
    elif kind == "file":
        with open(place, "xb") as target:
            left = facts["size"]
            while left:
                data = source.read(min(left, SAME_READ_BYTES))
                target.write(data)
                left -= len(data)
        os.chmod(place, facts["mode"])
        os.utime(place, ns=(facts["mtime_ns"], facts["mtime_ns"]))


def send(path: str, target: BinaryIO, size: int) -> None:
    """Copy a file that nobody writes to meanwhile."""
    with open(path, "rb") as source:
        shutil.copyfileobj(source, target)
        if source.tell() != size:
            raise OSError(f"{path} was {size} bytes and is {source.tell()}")


def remove(place: str) -> None:
    if is_directory(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)


def refuse_special(path: str) -> None:
    """Raise for what is there and is no file: to open a pipe would wait."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is no file")


def is_directory(place: str) -> bool:
    return os.path.isdir(place) and not os.path.islink(place)


def is_opaque(place: str) -> bool:
    try:
        return os.getxattr(place, OPAQUE) == b"y"
    except OSError:
        return False


def mode_of(place: str) -> int:
    return stat.S_IMODE(os.lstat(place).st_mode)


def is_same(one: str, other: str) -> bool:
    """Return whether two files or links are equal, in their bytes, modes and times."""
    if not os.path.lexists(other):
        return False
    first, second = os.lstat(one), os.lstat(other)
    if (first.st_mode, first.st_mtime_ns) != (second.st_mode, second.st_mtime_ns):
        return False
    if stat.S_ISLNK(first.st_mode):
        return os.readlink(one) == os.readlink(other)
    return stat.S_ISREG(first.st_mode) and filecmp.cmp(one, other, shallow=False)


def is_protected(path: str, protected: list[str]) -> bool:
    """Return whether a name in the path matches, or the path or a directory above it is listed, with "./" or without.
    With "./" an entry is no name: it means one place."""
    parts = path.split("/")
    above = {"/".join(parts[:number]) for number in range(1, len(parts) + 1)}
    return not (above | {f"./{path}" for path in above}).isdisjoint(protected) or any(
        fnmatch.fnmatchcase(part, name) for part in parts for name in protected
    )


def files_below(path: str) -> Iterator[str]:
    """Paths of the original tree: the path, or the files and links below it."""
    if not is_directory(f"{LOWER}/{path}"):
        if os.path.lexists(f"{LOWER}/{path}"):
            yield path
        return
    for place, names, files in os.walk(f"{LOWER}/{path}"):
        links = [name for name in names if os.path.islink(f"{place}/{name}")]
        yield from (os.path.relpath(f"{place}/{name}", LOWER) for name in sorted(files + links))


def difference(path: str, place: str | None) -> bytes:
    """The difference between a file of the original tree and the one at a place; None: it is gone. Empty for none."""
    import difflib

    (old, old_mode), (new, new_mode) = content_of(f"{LOWER}/{path}"), content_of(place)
    if (old, old_mode) == (new, new_mode):
        return b""
    name = path.encode(errors="surrogateescape")
    words = [b"diff --git a/%b b/%b" % (name, name)]
    if old is None:
        words.append(b"new file mode %o" % new_mode)
    elif new is None:
        words.append(b"deleted file mode %o" % old_mode)
    elif old_mode != new_mode:
        words += [b"old mode %o" % old_mode, b"new mode %o" % new_mode]
    if old != new:
        first = b"/dev/null" if old is None else b"a/" + name
        second = b"/dev/null" if new is None else b"b/" + name
        if b"\0" in (old or b"") or b"\0" in (new or b""):
            words.append(b"Binary files %b and %b differ" % (first, second))
        else:
            before, after = lines_of(old or b""), lines_of(new or b"")
            words += difflib.diff_bytes(difflib.unified_diff, before, after, first, second, lineterm=b"")
    return b"\n".join(words) + b"\n"


def lines_of(content: bytes) -> list[bytes]:
    """Lines without their ends; Git's remark is part of a last line that has none."""
    lines = content.split(b"\n")
    if lines[-1]:
        return [*lines[:-1], lines[-1] + b"\n\\ No newline at end of file"]
    return lines[:-1]


def content_of(place: str | None) -> tuple[bytes | None, int]:
    """Bytes of a file, or the target of a link, and Git's mode. None: there is neither."""
    if place is None or not os.path.lexists(place) or is_directory(place):
        return None, 0
    if os.path.islink(place):
        return os.readlink(place).encode(errors="surrogateescape"), 0o120000
    with open(place, "rb") as file:
        return file.read(), 0o100755 if mode_of(place) & 0o100 else 0o100644
