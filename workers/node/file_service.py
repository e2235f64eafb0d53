"""Files of one node for the others: the agent that has them sends them, another keeps a copy and checks every byte.

driver's node: offer(set, directory)          another node: obtain(set, path, source)
                    │                                           │ the same path has the same content: use it
                    └──────────── TCP, sendfile ◀───────────────┘ else fetch, verify, keep until the run's end

another node: scratch, offer ─────────────────▶ driver's node: collect(set, directory, source)

They are a model, a checkpoint, a user's code: a `FileSet`, by its content, so that a node can tell whether it has the
same ones, at any path.
"""

import os
import platform
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import xxhash

from penstock.conf.errors import ResourceError
from penstock.network.connection import Address, Connection, connect
from penstock.network.names import OutsideName, below
from penstock.store.data.roots import claim_root, guard_root, remove_root, sweep_stale
from penstock.workers.models.model_files import model_files
from penstock.workers.runtime.local_files import replacing
from penstock.workers.runtime.url_files import SavedFile, saved_file

FILES = 3
"""Service of an agent's port, a byte: a connection from another node asks for one. `agent.py` has all of them."""
FOUND, MISSING = 1, 2
"""Kinds of answers."""
BLOCK_BYTES = 2**20
"""Bytes that are received, summed and written at a time."""
CONNECT_S = 30.0
HASHING_THREADS = 4


@dataclass(frozen=True)
class FileSet:
    """Files below one directory. Their names are relative to it, with `/` between folders."""

    files: tuple[SavedFile, ...]

    @classmethod
    def of_directory(cls, directory: Path) -> "FileSet":
        """Make a set of all files of a checkpoint. Raises `OSError`."""
        return cls._of(directory, (path for path in directory.rglob("*") if path.is_file()))

    @classmethod
    def of_model(cls, directory: Path) -> "FileSet":
        """Make a set of the files of a model, whatever else is in its directory. Raises `OSError`, `ValueError`."""
        return cls._of(directory, (directory / name for name in model_files(directory)))

    @classmethod
    def of_code(cls, file: Path) -> "FileSet":
        """Make a set of a Python file and what it may import from beside it: the other files of its folder, and
        packages there."""
        folder = file.parent
        packages = [path.parent for path in folder.glob("*/__init__.py")]
        return cls._of(folder, {*folder.glob("*.py"), *(path for one in packages for path in one.rglob("*.py"))})

    @classmethod
    def _of(cls, directory: Path, paths: Iterable[Path]) -> "FileSet":
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            return cls(tuple(threads.map(lambda path: _named(directory, path), sorted(paths))))

    @cached_property
    def address(self) -> str:
        """The id of the content, equal for equal content: xxh3-128 of names, sizes and checksums, hexadecimal."""
        digest = xxhash.xxh3_128()
        for file in self.files:
            digest.update(f"{file.name}\0{file.num_bytes}\0{file.checksum}\n".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def lies_in(self, directory: Path) -> bool:
        """Return whether every file is there with the same content; others may lie beside them."""
        try:
            if any(os.stat(directory / file.name).st_size != file.num_bytes for file in self.files):
                return False
            with ThreadPoolExecutor(HASHING_THREADS) as threads:
                found = threads.map(lambda file: _named(directory, directory / file.name), self.files)
                return all(one == file for one, file in zip(found, self.files, strict=True))
        except OSError:
            return False


class FileService:
    """Lifecycle: `offer` and `obtain` in any order, `serve` for each connection, `close`. Any thread.

    `directory`: on this node's disk, made when the first copy is kept, removed by `close` or with this process.
    """

    def __init__(self, directory: Path, token: bytes) -> None:
        self._directory, self._token = directory, token
        self._offered: dict[str, tuple[FileSet, Path]] = {}
        self._lock, self._collecting = threading.Lock(), threading.Lock()

    def offer(self, files: FileSet, directory: Path) -> None:
        """Serve these files from a directory."""
        self._offered[files.address] = files, directory

    def obtain(self, files: FileSet, path: Path, source: Address) -> str:
        """Return where this node has the files, and offer them from now on: at `path`, where another has them, if they
        lie there as well; else a copy. Raises `ResourceError`."""
        with self._lock:
            if files.address not in self._offered:
                self.offer(files, path if files.lies_in(path) else self._copied(files, source))
            return str(self._offered[files.address][1])

    def collect(self, files: FileSet, directory: Path, source: Address) -> None:
        """Bring files that another node has written to a directory of this one, each in one step, and for good. A call
        that is late has ended before the next begins. Raises `ResourceError`."""
        with self._collecting:
            self._fetch(files, directory, source, synced=True)

    def _fetch(self, files: FileSet, directory: Path, source: Address, *, synced: bool) -> None:
        try:
            targets = [below(directory, file.name) for file in files.files]
            directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(directory).free
            if free < files.num_bytes:
                raise OSError(f"no room: {free:,} bytes are free")
            with connect(source, FILES, self._token, CONNECT_S) as connection:
                for number, (file, target) in enumerate(zip(files.files, targets, strict=True)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(target, synced=synced) as part:
                        _receive(connection, files.address, number, file, part)
        except (OSError, OutsideName) as error:
            raise ResourceError(
                f"{platform.node()}: {len(files.files)} files ({files.num_bytes:,} bytes) could not be fetched from "
                f"{source} into {directory}: {error}. The machines must reach each other on the ports of "
                "cluster.ports, and each needs room for a copy: cluster.files_dir says where. Or put the files on a "
                "path that all machines share."
            ) from None

    def scratch(self) -> Path:
        """Make a directory for files that another node is to collect. Raises `ResourceError`."""
        with self._lock:
            self._make_directory()
            try:
                return Path(tempfile.mkdtemp(prefix="out-", dir=self._directory))
            except OSError as error:
                raise ResourceError(
                    f"{platform.node()}: {self._directory} takes no directory ({error.strerror}). Make room there, or "
                    "set cluster.files_dir to a place with some."
                ) from None

    def discard(self, scratch: Path) -> None:
        """Remove a directory that has been collected, or will not be."""
        with self._lock:
            self._offered = {key: entry for key, entry in self._offered.items() if entry[1] != scratch}
        shutil.rmtree(scratch, ignore_errors=True)

    def serve(self, connected: socket.socket) -> None:
        """Serve a connection of another agent, until it ends."""
        with Connection(connected) as connection:
            try:
                while True:
                    address, number = msgspec.msgpack.decode(connection.receive().body, type=tuple[str, int])
                    self._send(connection, address, number)
            except (OSError, msgspec.MsgspecError):
                return  # it has what it wanted, or is gone

    def close(self) -> None:
        remove_root(self._directory)

    def _send(self, connection: Connection, address: str, number: int) -> None:
        try:
            files, directory = self._offered[address]
            file = files.files[number]
            with (directory / file.name).open("rb", buffering=0) as opened:
                connection.send(FOUND, num_bytes=file.num_bytes)
                connection.send_file(opened, 0, file.num_bytes)
        except (LookupError, FileNotFoundError) as error:
            connection.send(MISSING, f"{type(error).__name__}: {error}".encode())

    def _copied(self, files: FileSet, source: Address) -> Path:
        target = self._directory / files.address
        part = self._directory / f"{files.address}.part"
        self._make_directory()
        shutil.rmtree(part, ignore_errors=True)
        self._fetch(files, part, source, synced=False)  # a copy for this run
        part.rename(target)
        return target

    def _make_directory(self) -> None:
        """Make the directory, where it does not exist. Raises `ResourceError`."""
        if self._directory.exists():
            return
        try:
            sweep_stale(self._directory.parent)
            claim_root(self._directory)
            guard_root(self._directory)
        except OSError as error:
            raise ResourceError(
                f"{platform.node()}: {self._directory} cannot be made: {error}. Set cluster.files_dir to a directory "
                "that this user may write to on every machine."
            ) from None


def _receive(connection: Connection, address: str, number: int, file: SavedFile, target: Path) -> None:
    """Receive a file, and check it while it comes."""
    connection.send(0, msgspec.msgpack.encode((address, number)))
    answer = connection.receive()
    if answer.kind != FOUND or answer.num_bytes != file.num_bytes:
        raise OSError(f"{file.name} is not what it was: {answer.body.decode(errors='replace') or 'another size'}")
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with target.open("wb") as copy:
        for start in range(0, file.num_bytes, BLOCK_BYTES):
            some = block[: min(BLOCK_BYTES, file.num_bytes - start)]
            connection.receive_into(some)
            digest.update(some)
            copy.write(some)
    if digest.hexdigest() != file.checksum:
        raise OSError(f"{file.name} arrived damaged, or changes while it is read")


def _named(directory: Path, path: Path) -> SavedFile:
    file = saved_file(path)
    return SavedFile(path.relative_to(directory).as_posix(), file.num_bytes, file.checksum)
