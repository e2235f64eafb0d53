"""The files of publications: which one is written again, how it is mapped for writing, and how it is read.

A page of shared memory that is touched for the first time costs several times what writing it again costs. So the file
of the version before last becomes the next version's, by rename, if no process reads it any more, and two files take
turns:

    v11 sealed, v12 sealed, engines on v12   ─▶ writer of v13 takes v11's file ─▶ v12 sealed, v13 sealed

A trainer rank maps each of them once, and from then on writes at the speed of memory: no page fault, and no lock of the
file that ranks would wait for, as with `write(2)`.

Readers hold a shared lock on the file for as long as it is mapped (`MappedWeights`); a file is taken only when an
exclusive lock can be had, else a new one is made. The kernel frees the locks of dead processes. The newest sealed
publication is never taken: whatever happens to the writer, that one stays loadable.

A reader checks manifest, header and checksums. If it finds anything wrong it raises `WeightError` with file and tensor,
before any weight of the engine has changed. Of several engines on a node the first compares the checksums, while the
others wait, and notes file and manifest beside them: those with the same file and manifest need not compare them again
(`MappedWeights.verify_once`). The note goes before the file is written again.
"""

import contextlib
import fcntl
import json
import mmap
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.runtime.local_files import Shortage, Spans, reserve, write_whole
from penstock.workers.weights.publication.costs import how_to_enlarge
from penstock.workers.weights.publication.layout import ElementRange, Layout, TensorPlace, byte_span, compute_layout

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
LOCK_NAME, VERIFIED_NAME = ".lock", "verified"
POPULATE_READ, POPULATE_WRITE = 22, 23
"""madvise(2), Linux 5.14; the `mmap` module has no names for them."""
POPULATE_BYTES = 8 * 2**20
"""Bytes that are filled at a time: the call holds the interpreter's lock, so that a step of generation can come
between."""
MOST_THREADS, THREAD_BYTES = 8, 2**28
"""Most threads that sum a publication, and fewest bytes for each."""


def publication_directory(root: str | Path, version: int) -> Path:
    return Path(root) / f"v{version:08d}"


def publication_directories(root: str | Path) -> list[Path]:
    """Directories of publications, sealed or not, oldest version first."""
    return sorted(Path(root).glob("v[0-9]*"))


def is_sealed(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists()


@contextlib.contextmanager
def exclusive(root: str | Path) -> Iterator[None]:
    """Let one process at a time choose, take and remove files under this root."""
    with (Path(root) / LOCK_NAME).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare_file(root: str | Path, version: int, num_bytes: int, spans: Spans | None = None) -> Path:
    """Prepare the file that all ranks write this version into, of `num_bytes`, with every page of it, or where `spans`
    are given, every page of these. The first rank makes it; all later ones find it.

    An earlier publication of the same version is taken back. Raises `WeightError` when there is no room; nothing of
    the attempt is left behind then.
    """
    path = publication_directory(root, version)
    file = path / WEIGHTS_NAME
    path.mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        path.mkdir(exist_ok=True)
        if is_sealed(path):
            _unseal(path)
        if not file.exists():
            _reuse_idle_file(root, path)
        # A reused file has its pages already: it was written by the same ranks, or as a whole.
        short = reserve(file, num_bytes, _pages(spans or [(0, num_bytes)], num_bytes))
        if short is not None:
            shutil.rmtree(path, ignore_errors=True)
            raise _no_space(file, short)
    return file


def reclaim(directory: str | Path, keep: int = 2, but: str | None = None) -> list[str]:
    """Remove all but the newest `keep` publications; engines that still map one keep its memory until they release it.

    With two, the next version is written into the older. `but`: the directory of one that stays, too. Returns the
    directories removed.
    """
    with exclusive(directory):
        paths = publication_directories(directory)
        stale = [path for path in paths[: max(0, len(paths) - keep)] if str(path) != but]
        for path in stale:
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
    return [str(path) for path in stale]


@dataclass(frozen=True)
class WritableFile:
    """A whole file below a root, mapped into memory, shared and writable."""

    memory: mmap.mmap
    root: Path
    descriptor: int
    """Open file, which keeps the inode's number from being used again while the mapping stands for it."""
    is_fresh: bool = True
    """True if this process has just mapped it."""

    def window(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)`, to be written. Fills their page tables where the mapping is fresh."""
        if self.is_fresh:
            populate(self.memory, start, end, POPULATE_WRITE)
        return memoryview(self.memory)[start:end]


class WritableMappings:
    """A process's mappings of files that it writes again and again. Lifecycle: `unmap_stale` and `map` for each
    version; `close`. Threads may share it: a mapping that one releases stays with the threads that have it."""

    def __init__(self, make: Callable[[int, int], mmap.mmap] = mmap.mmap) -> None:
        """`make`: maps an open file, of so many bytes."""
        self._make = make
        self._files: dict[tuple[int, int], WritableFile] = {}
        """Mapped files by device and inode."""
        self._lock = threading.Lock()

    def map(self, file: Path, root: Path) -> WritableFile:
        """Map a file below a root. The mapping stays the same as long as it is the same file of the same size."""
        with self._lock:
            descriptor = os.open(file, os.O_RDWR)
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino)
            if key in self._files and len(self._files[key].memory) == status.st_size:
                os.close(descriptor)
                return replace(self._files[key], is_fresh=False)
            if key in self._files:
                os.close(self._files.pop(key).descriptor)
            self._files[key] = WritableFile(self._make(descriptor, status.st_size), root, descriptor)
            return self._files[key]

    def unmap_stale(self, root: Path) -> None:
        """End mappings of removed files, whose memory they hold, and of other roots than this."""
        with self._lock:
            for key, mapped in list(self._files.items()):
                if mapped.root != root or not os.fstat(mapped.descriptor).st_nlink:
                    os.close(self._files.pop(key).descriptor)

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1].descriptor)


def populate(memory: mmap.mmap, start: int, end: int, advice: int) -> None:
    """Fill the page tables of bytes `[start, end)`. Kernels before 5.14 refuse: then the first access does it."""
    start -= start % mmap.PAGESIZE
    with contextlib.suppress(OSError):
        for position in range(start, end, POPULATE_BYTES):
            memory.madvise(advice, position, min(POPULATE_BYTES, end - position))


def _unseal(path: Path) -> None:
    """Take a sealed publication back; its file is removed too if a process reads it."""
    with _lock_if_idle(path / WEIGHTS_NAME) as idle:
        (path / VERIFIED_NAME).unlink(missing_ok=True)
        (path / MANIFEST_NAME).unlink(missing_ok=True)
    if not idle:
        (path / WEIGHTS_NAME).unlink(missing_ok=True)


def _reuse_idle_file(root: str | Path, path: Path) -> None:
    """Move an idle file to `path`: of an attempt that was never sealed, else of the oldest but the newest sealed."""
    others = [other for other in publication_directories(root) if other != path]
    sealed = [other for other in others if is_sealed(other)]
    for other in [*(other for other in others if other not in sealed), *sealed[:-1]]:
        with _lock_if_idle(other / WEIGHTS_NAME) as idle:
            if idle:
                (other / MANIFEST_NAME).unlink(missing_ok=True)
                os.replace(other / WEIGHTS_NAME, path / WEIGHTS_NAME)
        if idle:
            shutil.rmtree(other, ignore_errors=True)
            return


@contextlib.contextmanager
def _lock_if_idle(file: Path) -> Iterator[bool]:
    """True if no process reads the file; then none can start to within the block.

    Remove the manifest within the block: a reader that comes later looks for it once it has the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(file.open("rb"))
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            yield False
        else:
            yield True


def _pages(spans: Spans, num_bytes: int) -> list[tuple[int, int]]:
    """Spans of whole pages; those of neighbours are joined."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        start -= start % mmap.PAGESIZE
        end = min(num_bytes, end + -end % mmap.PAGESIZE)
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _no_space(file: Path, short: Shortage) -> WeightError:
    return WeightError(
        f"{platform.node()}: no room for a publication in {file.parent}: {short.needed_bytes:,} bytes are needed, "
        f"{short.free_bytes:,} of {short.total_bytes:,} are free. Two publications must fit side by side, and a third "
        f"while an engine still loads the one before: {how_to_enlarge(3 * short.needed_bytes)}."
    )


@dataclass(frozen=True)
class Manifest:
    """The description of a publication: version, layout, checksums."""

    directory: Path
    version: int
    layout: Layout
    ranges: tuple[ElementRange, ...]

    @property
    def file(self) -> Path:
        return self.directory / WEIGHTS_NAME

    @property
    def digest(self) -> str:
        """Digest of all that the manifest says."""
        return xxhash.xxh3_128_hexdigest(_text_of(self).encode())


def write_manifest(manifest: Manifest) -> Publication:
    """Write the manifest, by rename: the publication is visible from here on."""
    write_whole(manifest.directory / MANIFEST_NAME, _text_of(manifest))
    return Publication(str(manifest.directory), manifest.version, manifest.layout.num_bytes)


def _text_of(manifest: Manifest) -> str:
    layout = manifest.layout
    fields = {
        "version": manifest.version,
        "num_bytes": layout.num_bytes,
        "tensors": {place.name: {"dtype": place.dtype, "shape": place.shape} for place in layout.tensors},
        "ranges": manifest.ranges,
    }
    return json.dumps(fields)


def open_publication(publication: Publication) -> Manifest:
    """The manifest of a sealed publication, checked for version, size and header.

    Raises `WeightError` when it is missing (or not sealed yet), unreadable, truncated, or of another version. Tensor
    bytes are not read here: see `MappedWeights.verify`.
    """
    directory = Path(publication.directory)
    manifest = _read_manifest(directory)
    if manifest.version != publication.version:
        raise WeightError(
            f"{directory / MANIFEST_NAME}: holds version {manifest.version}, but version {publication.version} was "
            "asked for."
        )
    try:
        size = manifest.file.stat().st_size
        with manifest.file.open("rb") as file:
            header = file.read(len(manifest.layout.header))
    except FileNotFoundError:
        raise WeightError(f"{manifest.file}: missing, though its manifest is there. Publish again.") from None
    if size != manifest.layout.num_bytes:
        raise WeightError(
            f"{manifest.file}: {size:,} bytes instead of {manifest.layout.num_bytes:,}: truncated. Publish again."
        )
    if header != manifest.layout.header:
        raise WeightError(f"{manifest.file}: its header does not match the manifest: damaged. Publish again.")
    return manifest


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text())
        layout = compute_layout((name, entry["shape"], entry["dtype"]) for name, entry in fields["tensors"].items())
        ranges = tuple(ElementRange(*entry) for entry in fields["ranges"])
        return Manifest(directory, int(fields["version"]), layout, ranges)
    except FileNotFoundError:
        raise WeightError(
            f"{path}: no such publication, or one that was never completed. Its trainer died, or it was reclaimed."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{path}: unreadable manifest ({type(error).__name__}: {error}). Publish again.") from None


class MappedWeights:
    """The file of a publication mapped into memory: tensors are views, nothing is copied until the caller does.

    Mapping and lock end when this object and the last tensor taken from it are gone. Until then no writer takes the
    file for another version. Writing into the views changes this process's copy only.

        mapped = MappedWeights(publication)
        mapped.verify()
        model.load_state_dict(dict(mapped.tensors()))
    """

    def __init__(self, publication: Publication, prefix: str = "") -> None:
        """Map the file and lock it. `prefix`: of the names of one of several models, whose tensors are these then.
        Raises `WeightError` as `open_publication` does, and when the publication is reclaimed meanwhile."""
        manifest = self.manifest = open_publication(publication)
        self._prefix = prefix
        try:
            with manifest.file.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.inode = os.fstat(file.fileno()).st_ino
                # A writer may have taken the file before the lock: it removes the manifest first.
                if _read_manifest(manifest.directory) != manifest or manifest.file.stat().st_ino != self.inode:
                    raise _reclaimed(manifest)
                # The mapping has a descriptor of its own for the same open file, and so keeps the lock.
                self._memory = mmap.mmap(file.fileno(), manifest.layout.num_bytes, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, BlockingIOError):
            raise _reclaimed(manifest) from None

    def read_from(self, files: WritableMappings) -> None:
        """Make tensors of the lasting mapping that a process has of this file, page-locked for its GPU. They must not
        be written to, and this object must outlive them, as the lock is its own."""
        root = self.manifest.directory.parent
        files.unmap_stale(root)
        with contextlib.suppress(FileNotFoundError):
            found = files.map(self.manifest.file, root)
            if os.fstat(found.descriptor).st_ino == self.inode:  # else the version was published again
                self._memory, self._locking = found.memory, self._memory

    def populate(self) -> None:
        """Fill the page tables, so that loading meets no page fault: most of a first read's time."""
        populate(self._memory, 0, len(self._memory), POPULATE_READ)

    def verify(self) -> None:
        """Compare every range's checksum, with several threads for a large file. Raises `WeightError` with the tensor
        and elements of the first that differs. The first read of a page fills the page tables around it, in any thread
        at once, which `populate` cannot."""
        view = memoryview(self._memory)

        def checksum(entry: ElementRange) -> str:
            start, end = byte_span(self.manifest.layout, entry)
            return xxhash.xxh3_128_hexdigest(view[start:end])

        with ThreadPoolExecutor(num_checking_threads(len(view))) as threads:
            ranges = self.manifest.ranges
            for entry, found in zip(ranges, threads.map(checksum, ranges), strict=True):
                if found != entry.checksum:
                    threads.shutdown(cancel_futures=True)
                    raise _damaged(self.manifest, entry, found)

    def verify_once(self) -> bool:
        """Verify, unless a process of this node has verified this very file; one that is at it is waited for. If it
        dies or finds the file damaged, the next one verifies. Returns whether this one has. Raises `WeightError`."""
        text = f"{self.inode} {self.manifest.digest}"
        try:
            note = (self.manifest.directory / VERIFIED_NAME).open("a+")
        except OSError:  # it was reclaimed meanwhile, or there is no room
            self.verify()
            return True
        with note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            if note.read() == text:
                return False
            self.verify()
            with contextlib.suppress(OSError):
                note.truncate(0)
                note.write(text)
                note.flush()
        return True

    @property
    def places(self) -> dict[str, TensorPlace]:
        """Place of each tensor, by its name without the prefix."""
        names, prefix = self.manifest.layout.by_name, self._prefix
        return {name.removeprefix(prefix): place for name, place in names.items() if name.startswith(prefix)}

    def tensor(self, name: str) -> "torch.Tensor":
        """A view of shape and dtype as published, on the CPU. Raises `WeightError` for an unknown name."""
        import torch

        place = self.manifest.layout.place(self._prefix + name)
        dtype = getattr(torch, place.dtype)
        if place.num_bytes == 0:
            return torch.empty(place.shape, dtype=dtype)
        count = place.num_bytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place.offset).reshape(place.shape)

    def copy_to(self, file: Path) -> None:
        """Copy the whole safetensors file."""
        file.write_bytes(self._memory)

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """All tensors, layer by layer (by name): engines that repack a layer at a time then hold one layer at a
        time."""
        for name in sorted(self.places):
            yield name, self.tensor(name)


def num_checking_threads(num_bytes: int) -> int:
    """Number of threads that sum a publication."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), num_bytes // THREAD_BYTES))


def _damaged(manifest: Manifest, entry: ElementRange, found: str) -> WeightError:
    last = entry.first_element + entry.num_elements - 1
    return WeightError(
        f"{manifest.file}: tensor {entry.name!r}, elements {entry.first_element} to {last} (written by rank "
        f"{entry.rank}): checksum {found}, manifest says {entry.checksum}. Damaged after it was written; publish again."
    )


def _reclaimed(manifest: Manifest) -> WeightError:
    return WeightError(
        f"{manifest.directory}: version {manifest.version} was reclaimed before it could be mapped; its file holds, or "
        "will hold, another version. Load the newest publication."
    )
