"""The saving of a store: a cut of it, from the moment that it is taken until it is a snapshot on disk.

    cut ─ slices between other calls, and each group before it changes ─▶ whole ─ a thread ─▶ disk ─ slices ─▶ released

Whatever the store does meanwhile, what is written is the state of the moment; no call waits for more than a slice. A
cut has copies of the groups and of the index of the data; the values behind it never change, so `write` may take its
time in a thread while the store goes on.
"""

import asyncio
import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import xxhash

from penstock.store.data import durable
from penstock.store.data.blobs import compact
from penstock.store.data.blocks import Blocks
from penstock.store.data.payload import Payload, assemble, gather
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError, TooLarge
from penstock.store.ledger.group import Group, bits
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.state import LedgerCut, scalars, values_of
from penstock.store.service.snapshot import FORMAT, MANIFEST, PREFIX, fingerprint, snapshots
from penstock.store.spec import StoreSpec

T = TypeVar("T")
Resolve = Callable[[Payload], Payload]
"""A function that reads the segments that a payload refers to."""
SLICE = 2048
"""Number of rows whose groups are copied, or released, at a time: a few milliseconds."""
ROWS_PER_BATCH = 256
"""Number of rows of one record batch, which memory must hold at a time, and of which a restored block consists."""
BYTES_PER_BATCH = 1 << 26
"""The most bytes of one record batch of several rows: a restored block is freed with the last of its rows."""
GROUPS_AT_ONCE = 256
_LISTS = pa.list_(pa.int64())
GROUPS = pa.schema(
    [
        ("id", pa.int64()),
        ("live", pa.binary()),
        ("have", pa.list_(pa.binary())),
        ("done", pa.list_(pa.binary())),
        ("prompt_tokens", pa.int64()),
        ("shared_bytes", pa.int64()),
        ("oldest", _LISTS),
        ("response_tokens", _LISTS),
        ("context_tokens", _LISTS),
        ("row_bytes", _LISTS),
    ]
)
"""Columns of the ledger's groups, one row each."""


@dataclass(frozen=True)
class SnapshotState:
    """The state of a store at one moment."""

    spec: StoreSpec
    scalars: dict[str, Any]
    groups: list[Group]
    """Living groups, by number."""
    with_source: list[int]
    """Numbers of groups that have the source's values."""
    blocks: Blocks
    """A copy of the index; the values are shared."""

    def rows(self) -> dict[tuple[str, ...], list[int]]:
        """Ids of rows, by the columns beside the source's that they have."""
        names = [column.name for column in self.spec.columns]
        rows: dict[tuple[str, ...], list[int]] = {}
        for group in self.groups:
            for index in bits(group.live):
                present = tuple(
                    name
                    for name, have in zip(names, group.have, strict=True)
                    if have >> index & 1 and name not in self.spec.source_columns
                )
                if present:
                    rows.setdefault(present, []).append(group.id * self.spec.group_size + index)
        return rows


class StoreCut:
    """A cut. Its values stay until `release`: the rows may end while it is written."""

    def __init__(self, ledger: Ledger, blocks: Blocks) -> None:
        self._ledger, self._blocks = ledger, blocks
        self._scalars, self._copied = scalars(ledger), blocks.begin_copy()
        self._slice = max(1, SLICE // ledger.spec.group_size)
        self._cut = LedgerCut(ledger.residents, lambda group: blocks.keep(group, self._copied))
        self._copying = asyncio.get_running_loop().create_task(self._copy())

    async def copied(self) -> None:
        """Wait until all is copied."""
        await asyncio.shield(self._copying)

    def write(
        self, root: str, number: int, keep: int, resolve: Resolve | None, check_wanted: Callable[[], None]
    ) -> str:
        """Write the cut, in a thread, once all is copied. Returns its path. `check_wanted`: as of `write`."""
        cut, spec = self._cut, self._ledger.spec
        state = SnapshotState(spec, self._scalars, cut.groups, cut.with_source, self._copied)
        return str(write(root, number, state, resolve, keep=keep, check_wanted=check_wanted))

    def stop(self) -> None:
        """Copy no more. A second time changes nothing."""
        self._copying.cancel()
        self._cut.close()

    async def release(self) -> None:
        self.stop()
        while self._blocks.release_copy(self._copied, self._slice):
            await asyncio.sleep(0)

    async def _copy(self) -> None:
        while self._cut.copy(self._slice):
            await asyncio.sleep(0)


class Saving:
    """The cuts of a store. Lifecycle: `cut` and `write` in turns; a cut that is not written gives way to the next."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments | None) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments
        self._cut: StoreCut | None = None
        self._writing = asyncio.Lock()
        """Held while a snapshot is written: a late one has ended before the next begins."""
        self._under_way: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Take the state of this moment."""
        if self._cut is not None:
            self._cut.stop()
            self._begin(self._cut.release())
        self._cut = StoreCut(self._ledger, self._blocks)

    async def write(self, root: str, number: int, keep: int, is_apart: bool, timeout_s: float) -> str:
        """Write the last cut, or else the state of this moment, in a thread. Returns its path. `is_apart`: the state of
        this moment, and the last cut is another's. A caller that is cancelled does not end it, but its deadline does.
        Raises `StoreError`."""
        cut = None if is_apart else self._cut
        if not is_apart:
            self._cut = None
        cut, wanted = cut or StoreCut(self._ledger, self._blocks), _Wanted(root, timeout_s)
        return await asyncio.shield(self._begin(self._write(cut, root, number, keep, wanted)))

    async def _write(self, cut: StoreCut, root: str, number: int, keep: int, wanted: "_Wanted") -> str:
        try:
            await wanted.in_time(self._writing.acquire())
            try:
                await wanted.in_time(cut.copied())
                resolve = self._segments.reader() if self._segments is not None else None
                return await asyncio.to_thread(cut.write, root, number, keep, resolve, wanted.check)
            finally:
                self._writing.release()
        except OSError as error:
            raise StoreError(f"{root}: the store's snapshot cannot be written: {error}") from None
        finally:
            await cut.release()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits for it hears of it


class _Wanted:
    """The deadline of a snapshot: the work ends with it, wherever it is."""

    def __init__(self, root: str, timeout_s: float) -> None:
        self._root, self._timeout_s = root, timeout_s
        self._until = time.monotonic() + timeout_s

    async def in_time(self, work: Awaitable[Any]) -> None:
        """Wait for a part of the work. Raises `StoreError` after the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._until - time.monotonic()):
                await work
                return
        raise self._late()

    def check(self) -> None:
        """Raise `StoreError` after the deadline."""
        if time.monotonic() > self._until:
            raise self._late()

    def _late(self) -> StoreError:
        return StoreError(
            f"{self._root}: the store's snapshot was given up after {self._timeout_s:g} s. See whether the disk there "
            "answers."
        )


def write(
    root: str | Path,
    number: int,
    state: SnapshotState,
    resolve: Resolve | None = None,
    *,
    keep: int = 2,
    check_wanted: Callable[[], None] = lambda: None,
) -> Path:
    """Write `ROOT/snapshot-<number>` whole or not at all, and delete all but the newest `keep`. Returns its path.
    `check_wanted`: called now and then; what it raises ends the writing. No other thread or process writes there."""
    root = Path(root)
    for left in root.glob(f".{PREFIX}*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part = root / f".{PREFIX}{number:08d}.{uuid.uuid4().hex[:8]}.part"
    part.mkdir(parents=True)
    try:
        _write_parts(part, state, resolve, check_wanted)
        durable.sync_tree(part)
        check_wanted()
        target = root / f"{PREFIX}{number:08d}"
        if target.exists():
            shutil.rmtree(target)
        durable.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in snapshots(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write_parts(part: Path, state: SnapshotState, resolve: Resolve | None, check_wanted: Callable[[], None]) -> None:
    """Write the files of a snapshot, the manifest last."""
    source = list(state.spec.source_columns)
    size = state.spec.group_size
    tables = {"groups.arrow": groups_batches(state.groups, size)}
    source_rows = [group * size for group in state.with_source]
    tables["source.arrow"] = _batches(state, source_rows, source, "group_id", resolve)
    for index, (names, rows) in enumerate(sorted(state.rows().items())):
        tables[f"rows-{index}.arrow"] = _batches(state, rows, list(names), "row_id", resolve)
    files = {name: _write_ipc(part / name, batches, check_wanted) for name, batches in tables.items()}
    manifest = {"format": FORMAT, "fits": fingerprint(state.spec), "ledger": state.scalars, "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1))


def groups_batches(groups: list[Group], size: int) -> Iterator[pa.RecordBatch]:
    """Iterate over a few hundred at a time: Arrow lets no other thread of Python run meanwhile. At least one batch."""
    for start in range(0, max(1, len(groups)), GROUPS_AT_ONCE):
        some = [values_of(group, size) for group in groups[start : start + GROUPS_AT_ONCE]]
        yield pa.RecordBatch.from_pylist(some, schema=GROUPS)


def _batches(
    state: SnapshotState, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
) -> Iterator[pa.RecordBatch]:
    """Iterate over the columns of the rows, a few hundred at a time; at least one batch, so that the file has its
    schema."""
    for start in range(0, max(1, len(rows)), ROWS_PER_BATCH):
        yield from _fitting(state, rows[start : start + ROWS_PER_BATCH], names, id_name, resolve)


def _fitting(
    state: SnapshotState, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
) -> Iterator[pa.RecordBatch]:
    """A batch, or several where that would be too large for Arrow; each row has come in one, and fits."""
    try:
        payload = gather(state.blocks, rows, names)
        if resolve is not None:
            payload = resolve(payload)
        table = assemble(payload, names, []).table()
    except TooLarge:
        if len(rows) < 2:
            raise
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            yield from _fitting(state, half, names, id_name, resolve)
        return
    ids = pa.array(payload.group_ids if id_name == "group_id" else payload.row_ids)
    columns = [table.column(name).combine_chunks() for name in names]
    yield from _parts(pa.RecordBatch.from_arrays([ids, *columns], names=[id_name, *names]))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch, or several where it has many bytes, each with no more blobs than its own."""
    batch = pa.RecordBatch.from_arrays(list(map(compact, batch.columns)), names=batch.schema.names)
    if batch.nbytes <= BYTES_PER_BATCH or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _write_ipc(file: Path, batches: Iterator[pa.RecordBatch], check_wanted: Callable[[], None]) -> dict[str, Any]:
    """Write batches to a file. Returns the size and checksum of what was to be written."""
    first = next(batches)
    with file.open("wb") as opened:
        summed = _Summed(opened)
        with pa.ipc.new_file(summed, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                check_wanted()
                writer.write_batch(batch)
    return summed.facts()


class _Summed:
    """A file that sums what is written to it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._num_bytes = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._digest.update(view)
        self._num_bytes += view.nbytes
        return self._file.write(view)

    def flush(self) -> None:
        self._file.flush()

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "xxh3_128": self._digest.hexdigest()}
