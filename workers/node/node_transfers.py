"""What one node sends to others: files, and copies of ranks' states. The agent that has them sends them, and the one
that fetches them checks every byte.

    driver's node: offer(set, directory)          another node: obtain(set, path, source)
                        │                                           │ the same path has the same content: use it
                        └──────────── TCP, sendfile ◀───────────────┘ else fetch, verify, keep until the run's end

    another node: scratch, offer ─────────────────▶ driver's node: collect(set, directory, source)

Files are a model, a checkpoint, a user's code: a `FileSet`, by its content, so that a node knows whether it has the
same ones, at any path.

    partner's node: fetch(trainer, {rank: step}, source)        the rank's node: serve
          begin a slot ◀── TCP: header, then the bytes by sendfile ── the slot that has the step
          each block against its checksum ─▶ seal

States are in-memory checkpoints of trainers (`workers/trainer/memory_checkpoint.py`): a rank's copies on a second node,
in case its own is lost. The same paths on both nodes, and the same two slots in turn: what was brought before stays
whole until the next is. A rank continues while its copy is sent. A copy that it writes over meanwhile fails its
checksums, and the next step's is fetched instead.
"""

import os
import platform
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.conf.errors import MemoryCheckpointError, ResourceError
from penstock.network.connection import Address, Connection, Frame, connect
from penstock.network.names import OutsideName, below, checked
from penstock.store.data.roots import claim_root, guard_root, remove_root, sweep_stale
from penstock.workers.models.model_files import model_files
from penstock.workers.runtime.local_files import replacing
from penstock.workers.runtime.url_files import SavedFile, saved_file
from penstock.workers.trainer.memory_slots import (
    Header,
    Slots,
    copied_ranks,
    copied_steps,
    from_json,
    keep_only,
    reserve_slots,
    to_json,
)
from penstock.workers.weights.publication.publication_files import WritableMappings

FILES = 3
"""Service of an agent's port, a byte: a connection from another node asks for one. `node_agent.py` has all of them."""
FOUND, MISSING = 1, 2
"""Kinds of answers."""
BLOCK_BYTES = 2**20
"""Bytes that are received, summed and written at a time."""
CONNECT_S = 30.0
HASHING_THREADS = 4
STATES = 4
"""Service of an agent's port, as `FILES`."""
STREAMS = 4
"""Ranks whose copies are fetched at the same time: a connection each, and a thread that sums."""


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
        """Return whether every file is there with the same content; more files may lie beside them."""
        try:
            if any(os.stat(directory / file.name).st_size != file.num_bytes for file in self.files):
                return False
            with ThreadPoolExecutor(HASHING_THREADS) as threads:
                found = threads.map(lambda file: _named(directory, directory / file.name), self.files)
                return all(one == file for one, file in zip(found, self.files, strict=True))
        except OSError:
            return False


def _answer_requests(connected: socket.socket, shape: Any, send: Callable[..., None]) -> None:
    """Answer the requests of another agent, until its connection ends. `shape`: type of a request; `send`: answers one,
    by its fields."""
    with Connection(connected) as connection, suppress(OSError, msgspec.MsgspecError, MemoryCheckpointError):
        while True:
            send(connection, *msgspec.msgpack.decode(connection.receive().body, type=shape))


def _request(connection: Connection, *fields: Any) -> Frame:
    """Send a request; return the head of its answer."""
    connection.send(0, msgspec.msgpack.encode(fields))
    return connection.receive()


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
        _answer_requests(connected, tuple[str, int], self._send)

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
    answer = _request(connection, address, number)
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


def partners(nodes: Sequence[str], node_of_rank: Mapping[int, str]) -> dict[int, str]:
    """The node that has a second copy of each rank's state: the next after its own, in the order of `nodes`, which
    wraps around; none where there is no other.

    `nodes`: those that live, each with shared memory of its own. So each node has the copies of one other's ranks, and
    losing any one node loses no rank's state.
    """
    if len(nodes) < 2:
        return {}
    place = {node: number for number, node in enumerate(nodes)}
    return {rank: nodes[(place[node] + 1) % len(nodes)] for rank, node in node_of_rank.items()}


class StateService:
    """Lifecycle: any calls in any order, `serve` for each connection, `close`. Any thread; one `fetch` at a time."""

    def __init__(self, root: Path, token: bytes) -> None:
        """`root`: the directory that has a folder for each trainer."""
        self._root, self._token = root, token
        self._mappings = WritableMappings()
        self._fetching = threading.Lock()
        self.received_bytes = 0

    def there(self, trainer: str) -> dict[int, list[int]]:
        """Steps whose whole copies this node has, by rank."""
        folder = self._folder(trainer)
        found = {rank: copied_steps(folder, rank) for rank in copied_ranks(folder)}
        return {rank: steps for rank, steps in found.items() if steps}

    def fetch(self, trainer: str, copies: Mapping[int, int], source: Address) -> None:
        """Bring a step of each rank here, from the node whose agent listens at `source`. What is here already stays as
        it is. Raises `MemoryCheckpointError`; what was brought of other ranks, and what was here, is whole all the
        same."""
        with self._fetching, ThreadPoolExecutor(STREAMS) as threads:
            futures = [threads.submit(self._fetch, trainer, rank, step, source) for rank, step in copies.items()]
        for future in futures:
            future.result()

    def keep_only(self, trainer: str, ranks: Collection[int], up_to: int) -> None:
        """Remove copies of other ranks and of later steps."""
        keep_only(self._folder(trainer), ranks, up_to)
        self._mappings.unmap_stale(self._root)

    def serve(self, connected: socket.socket) -> None:
        """Serve a connection of another agent, until it ends."""
        _answer_requests(connected, tuple[str, int, int], self._send)

    def close(self) -> None:
        self._mappings.close()

    def _send(self, connection: Connection, trainer: str, rank: int, step: int) -> None:
        slots = Slots(self._folder(trainer), rank)
        copies = slots.copies()
        if step not in copies:
            connection.send(MISSING, f"it has those of steps {sorted(copies)}".encode())
            return
        slot, header = copies[step]
        with slots.data(slot).open("rb", buffering=0) as file:
            connection.send(FOUND, to_json(header).encode(), header.num_bytes)
            connection.send_file(file, 0, header.num_bytes)

    def _fetch(self, trainer: str, rank: int, step: int, source: Address) -> None:
        slots = Slots(self._folder(trainer), rank)
        try:
            with connect(source, STATES, self._token, CONNECT_S) as connection:
                answer = _request(connection, trainer, rank, step)
                header = from_json(answer.body) if answer.kind == FOUND else None
                if header is None or (header.rank, header.step, header.num_bytes) != (rank, step, answer.num_bytes):
                    raise OSError(f"it is not there ({answer.body[:200].decode(errors='replace')})")
                if slots.copies().get(step, (0, None))[1] != header:  # nodes that share their memory have it already
                    self._receive(connection, slots, header)
        except OSError as error:
            raise MemoryCheckpointError(
                f"the copy of rank {rank} after step {step} could not be fetched from {source} into "
                f"{slots.directory}: {error}. The one before stays until the next is fetched."
            ) from None

    def _receive(self, connection: Connection, slots: Slots, header: Header) -> None:
        if short := reserve_slots(slots, header.num_bytes, header.leave_bytes):
            raise OSError(short)
        slot = slots.begin(header.step)
        file = self._mappings.map(slots.data(slot), self._root)
        start = 0
        for block in header.blocks:
            end = start + block.num_bytes
            some = file.window(start, end)
            connection.receive_into(some)
            if len(some) != block.num_bytes or xxhash.xxh3_128_hexdigest(some) != block.checksum:
                raise OSError("it arrived damaged, or was written over while it was read")
            start = end
        if start != header.num_bytes:
            raise OSError(f"its blocks have {start:,} bytes, and it has {header.num_bytes:,}")
        self.received_bytes += start
        slots.seal(slot, header)

    def _folder(self, trainer: str) -> Path:
        try:
            return self._root / checked(trainer)
        except OutsideName as error:
            raise MemoryCheckpointError(f"{error} A trainer's is its role.") from None
