"""Original trees of workspaces: an archive or directory, unpacked once a node for all processes that use it.

    archive or directory ─▶ TEMP/penstock-trees-UID/KEY/tree     which belongs to the user of the fence
                                                    KEY.lock     shared by users; exclusive to unpack, remove

The key is made of the source's path, size and times, so that a changed source is another tree. A copy, and never links:
a write in place would reach the source. The last user removes the tree; if it is killed, the next process that asks for
any tree does.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from lzma import LZMAError
from pathlib import Path

from penstock.conf.errors import ConfigError

OWNER_ONLY = 0o700
TAG = "org.opencontainers.image.ref.name"
UNPACK_S = 1800.0
UNREADABLE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, OSError, EOFError, subprocess.TimeoutExpired,
)  # fmt: skip
SUFFIXES = ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "zip")


class OriginalTree:
    """A tree that this process uses. Lifecycle: `of` a source, `close`; without that, it is used as long as the object
    is there."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        """Directory of the tree, which is not written to."""
        self._release = weakref.finalize(self, os.close, lock)

    @classmethod
    def of(cls, source: Path, owner: int | None) -> "OriginalTree":
        """Unpack the source unless that was done. `owner`: user and group of the files; None: this process's. Raises
        `ConfigError` for a source that is not there or cannot be read."""
        base = base_directory()
        own_directory(base, 0o755)
        sweep(base)
        directory = base / key_of(source)
        while True:
            lock = locked(directory.with_suffix(".lock"), fcntl.LOCK_SH)
            if directory.exists():
                return cls(directory / "tree", lock)
            os.close(lock)
            lock = locked(directory.with_suffix(".lock"), fcntl.LOCK_EX)
            try:
                if not directory.exists():
                    unpack(source, directory, owner)
            finally:
                os.close(lock)

    def close(self) -> None:
        """Give the tree up. It is removed if nobody else uses it."""
        if self._release.alive:
            self._release()
            sweep(self.path.parent.parent)


def base_directory() -> Path:
    """Directory of this user's trees on this node."""
    return Path(tempfile.gettempdir()) / f"penstock-trees-{os.geteuid()}"


def own_directory(path: Path, mode: int) -> None:
    """Make a directory unless it is there. Raises `ConfigError` for one that others may write to."""
    with suppress(FileExistsError):
        path.mkdir(mode=mode)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(f"workspace: {path} is not a directory that only this user may write to. Remove it.")


def key_of(source: Path) -> str:
    """Name for what is at the source now. Raises `ConfigError`."""
    try:
        facts = [os.path.realpath(source), *map(str, stats_of(source))]
    except OSError as error:
        raise ConfigError(f"workspace: {source}: {error.strerror}. A tree is a directory or an archive.") from None
    return hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()[:24]


def stats_of(source: Path) -> Iterator[tuple[object, ...]]:
    """Facts of a file, or of all files in a directory, that change with their content."""
    found = os.stat(source)
    yield found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode
    for place, names, files in os.walk(source):
        names.sort()
        for name in sorted(names + files):
            one = os.lstat(f"{place}/{name}")
            yield place, name, one.st_size, one.st_mtime_ns, one.st_mode


def locked(path: Path, kind: int) -> int:
    """Open and lock a file. Raises `BlockingIOError` if the kind is not to wait."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, kind)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed meanwhile


def sweep(base: Path, remove: Callable[[Path], object] = shutil.rmtree) -> None:
    """Remove trees that nobody uses. The lock of one that is not gone is left for the next sweep."""
    for path in base.glob("*.lock"):
        try:
            lock = locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        directories = [directory for directory in base.glob(f"{path.stem}*") if directory != path]
        for directory in directories:
            remove(directory)
        if not any(directory.exists() for directory in directories):
            path.unlink()
        os.close(lock)


def unpack(source: Path, directory: Path, owner: int | None) -> None:
    """Unpack beside the directory, and rename. Raises `ConfigError`."""
    made = directory.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=0o755)
    tree = made / "tree"
    try:
        if (source / "oci-layout").is_file():
            unpack_image(source, tree)
        elif source.is_dir():
            shutil.copytree(source, tree, symlinks=True, ignore=special_files)
        elif zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                archive.extractall(tree)
        else:
            with tarfile.open(source) as archive:
                archive.extractall(tree, filter=plain_member)
    except UNREADABLE as error:
        shutil.rmtree(made, ignore_errors=True)
        raise ConfigError(
            f"workspace: {source} cannot be unpacked: {error}. A tree is a directory or an archive ("
            f"{', '.join(SUFFIXES)})."
        ) from None
    give(tree, owner)
    made.rename(directory)


def unpack_image(layout: Path, tree: Path) -> None:
    """Unpack the only image of a directory in the OCI's layout."""
    umoci = shutil.which("umoci")
    if umoci is None:
        raise ConfigError(f"workspace: {layout} is an image, and there is no umoci on the PATH. `apt install umoci`.")
    images = json.loads((layout / "index.json").read_text())["manifests"]
    if len(images) != 1 or TAG not in images[0].get("annotations", {}):
        raise ConfigError(
            f"workspace: {layout} has not one image with a tag, but {len(images)}. Copy one into its own."
        )
    image = f"{layout}:{images[0]['annotations'][TAG]}"
    words = [umoci, "raw", "unpack", "--rootless", "--image", image, str(tree)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=UNPACK_S)
    if done.returncode:
        raise OSError(done.stderr.strip()[-300:])


def special_files(place: str, names: list[str]) -> list[str]:
    """Pipes, sockets and devices, which are not copied."""
    modes = {name: os.lstat(f"{place}/{name}").st_mode for name in names}
    return [
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def plain_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Python's filter "tar" (nothing outside of the directory, no set-user-ID), and no hard link to what is outside.
    Owners are set afterwards."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    if member.islnk():
        target = os.path.realpath(os.path.join(path, member.linkname))
        if not Path(target).is_relative_to(os.path.realpath(path)):
            raise tarfile.LinkOutsideDestinationError(member, target)
    return tarfile.tar_filter(member, path)


def give(tree: Path, owner: int | None) -> None:
    """Make files and directories the user's, who can then read and search all of them."""
    user, group = (os.geteuid(), os.getegid()) if owner is None else (owner, owner)
    for place, names, files in os.walk(tree):
        for path in (place, *(f"{place}/{name}" for name in names + files)):
            os.lchown(path, user, group)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                os.chmod(path, stat.S_IMODE(mode) & 0o1777 | (0o700 if stat.S_ISDIR(mode) else 0o400))
