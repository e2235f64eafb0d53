"""Snapshots of a store: a cut of its state, written to disk while it serves, checked before anything is restored.

    cut ─ slices between other calls, and each group before it changes ─▶ whole ─ a thread ─▶ disk ─ slices ─▶ released

    ROOT/snapshot-00000012/
        manifest.json      format, the spec that it fits, the ledger's scalars, size and checksum of every file
        groups.arrow       the ledger's groups (`GROUPS`)
        source.arrow       group, and the columns that the source wrote
        rows-0.arrow …     row, and the columns that these rows have: one file for each set of columns

What is written is the state of the moment of the cut; no call waits for more than a slice. The cut is as if every lease
had just been given back, so it can be restored for other workers, and other numbers of them. A batch that is formed but
not yet trained by all ranks is formed again: the process that restores the store restores the weights from before that
step as well. A snapshot is written beside its final place and renamed. Arrow IPC and JSON, no pickle: readable by
anything, and nothing in it runs.
"""

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import xxhash

from penstock.network.names import OutsideName, checked
from penstock.store.data import durable
from penstock.store.data.block_index import BlockIndex, Payload, ValueBlock, assemble, gather
from penstock.store.data.schema import compact_blobs
from penstock.store.data.segments import Segments
from penstock.store.errors import CorruptSnapshot, StoreError, TooLarge
from penstock.store.ledger.group import Group, bits
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.lost_values import NODE_LOST, lacks_source
from penstock.store.ledger.residents import Effects, Residents
from penstock.store.spec import StoreSpec

T = TypeVar("T")
FORMAT = 2
PREFIX = "snapshot-"
MANIFEST = "manifest.json"
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
Resolve = Callable[[Payload], Payload]
"""A function that reads the segments that a payload refers to."""


class StoreCut:
    """A cut of a store: copies of its groups and of the index of the values, which are shared. Its values stay until
    `release`: the rows may end while it is written."""

    def __init__(self, ledger: Ledger, blocks: BlockIndex) -> None:
        self.spec, self._blocks = ledger.spec, blocks
        self.scalars, self.blocks = scalars(ledger), blocks.new_copy()
        self._slice = max(1, SLICE // ledger.spec.group_size)
        self.ledger = LedgerCut(ledger.residents, lambda group: blocks.copy_group(group, self.blocks))
        self._copying = asyncio.get_running_loop().create_task(self._copy())

    async def copied(self) -> None:
        """Wait until all is copied."""
        await asyncio.shield(self._copying)

    def rows(self) -> dict[tuple[str, ...], list[int]]:
        """Ids of rows, by the columns beside the source's that they have."""
        names = [column.name for column in self.spec.columns]
        rows: dict[tuple[str, ...], list[int]] = {}
        for group in self.ledger.groups:
            for index in bits(group.live):
                present = tuple(
                    name
                    for name, have in zip(names, group.have, strict=True)
                    if have >> index & 1 and name not in self.spec.source_columns
                )
                if present:
                    rows.setdefault(present, []).append(group.id * self.spec.group_size + index)
        return rows

    def stop(self) -> None:
        """Copy no more. A second time changes nothing."""
        self._copying.cancel()
        self.ledger.close()

    async def release(self) -> None:
        self.stop()
        while self._blocks.release_copy(self.blocks, self._slice):
            await asyncio.sleep(0)

    async def _copy(self) -> None:
        while self.ledger.copy(self._slice):
            await asyncio.sleep(0)


class SnapshotWriter:
    """The cuts of a store. Lifecycle: `cut` and `write` in turns; a cut that is not written gives way to the next."""

    def __init__(self, ledger: Ledger, blocks: BlockIndex, segments: Segments | None) -> None:
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
        cut, deadline = cut or StoreCut(self._ledger, self._blocks), _Deadline(root, timeout_s)
        return await asyncio.shield(self._begin(self._write(cut, root, number, keep, deadline)))

    async def _write(self, cut: StoreCut, root: str, number: int, keep: int, deadline: "_Deadline") -> str:
        try:
            await deadline.in_time(self._writing.acquire())
            try:
                await deadline.in_time(cut.copied())
                resolve = self._segments.reader() if self._segments is not None else None
                path = await asyncio.to_thread(write, cut, root, number, keep, resolve, deadline.check)
                return str(path)
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
            task.exception()  # a caller that still waits gets it


class _Deadline:
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
        raise self._late_error()

    def check(self) -> None:
        """Raise `StoreError` after the deadline."""
        if time.monotonic() > self._until:
            raise self._late_error()

    def _late_error(self) -> StoreError:
        return StoreError(
            f"{self._root}: the store's snapshot was given up after {self._timeout_s:g} s. See whether the disk there "
            "answers."
        )


class LedgerCut:
    """A copy of the groups, without leases and without what is free. Lifecycle: made at its moment, `copy` until
    nothing is left or `close`; then it costs the ledger nothing more."""

    def __init__(self, residents: Residents, kept: Callable[[int], None] = lambda group: None) -> None:
        """Begin at this moment. `kept`: called with each group's number when it is copied, before it changes."""
        self._residents, self._kept = residents, kept
        self._first, self._end = next(iter(residents.groups), residents.next_group), residents.next_group
        self._next = self._first
        self._copied: dict[int, Group] = {}
        self._lacking: set[int] = set()
        residents.watchers.append(self._keep)

    def copy(self, count: int) -> bool:
        """Copy the groups of so many numbers more. Returns whether any numbers are left."""
        end = min(self._end, self._next + count)
        groups = self._residents.groups
        for number in range(self._next, end):
            if (group := groups.get(number)) is not None:
                self._keep(group)
        self._next = end
        if end == self._end:
            self.close()
        return end < self._end

    def close(self) -> None:
        """Copy no more. A second time changes nothing."""
        if self._keep in self._residents.watchers:
            self._residents.watchers.remove(self._keep)

    @property
    def groups(self) -> list[Group]:
        """The copied groups, by number. For any thread, once all are copied: sorting would keep Python's lock too
        long."""
        return [self._copied[number] for number in range(self._first, self._end) if number in self._copied]

    @property
    def with_source(self) -> list[int]:
        """Numbers of the copied groups that have the source's values, ascending."""
        copied, lacking = self._copied, self._lacking
        return [number for number in range(self._first, self._end) if number in copied and number not in lacking]

    def _keep(self, group: Group) -> None:
        if not group.live or not self._next <= group.id < self._end or group.id in self._copied:
            return
        self._copied[group.id] = group.copy()
        if lacks_source(self._residents, group):
            self._lacking.add(group.id)
        self._kept(group.id)


def scalars(ledger: Ledger) -> dict[str, Any]:
    residents, rounds = ledger.residents, ledger.rounds
    under_way = sum(not (made.ended or made.void) for made in rounds.batches())
    return {
        "next_group": residents.next_group,
        "next_lease": residents.leases.next_id,
        "formed": rounds.formed - under_way,
        "served": residents.credits.served_version,
        "credits_due": {str(version): groups for version, groups in residents.credits.due.items()},
        "staleness_max": rounds.staleness_max,
        "counters": dict(residents.counters),
        "past": {str(group): list(ended) for group, ended in residents.past.items()},
        "outcomes": None if residents.outcomes is None else residents.outcomes.as_values(_first_asked(residents)),
        "waits": {stage.name: [stage.waited_s, stage.num_taken] for stage in residents.readiness.stages},
    }


def _first_asked(residents: Residents) -> int:
    """The oldest group whose outcome a source may still ask for: it asks a step before it draws, and may lag."""
    spec = residents.spec
    return residents.next_group - spec.max_active_groups - 2 * spec.groups_per_step - spec.window


def values_of(group: Group, size: int) -> dict[str, Any]:
    """State of a group. `size`: samples of a group. Masks are little-endian bytes, one bit a sample."""
    width = (size + 7) // 8
    return {
        "id": group.id,
        "live": group.live.to_bytes(width, "little"),
        "have": [mask.to_bytes(width, "little") for mask in group.have],
        "done": [mask.to_bytes(width, "little") for mask in group.done],
        "prompt_tokens": group.prompt_tokens,
        "shared_bytes": group.shared_bytes,
        "oldest": group.oldest,
        "response_tokens": group.response_tokens,
        "context_tokens": group.context_tokens,
        "row_bytes": group.row_bytes,
    }


def restore(ledger: Ledger, values: dict[str, Any], groups: Iterable[dict[str, Any]]) -> None:
    """Put a state into an empty ledger, all of its rows free or done. The ledger's own bounds hold, and may differ."""
    spec, residents = ledger.spec, ledger.residents
    residents.next_group, residents.leases.next_id = values["next_group"], values["next_lease"]
    residents.counters = ledger.counters = Counter(values["counters"])
    residents.past = {int(group): (mask, version) for group, (mask, version) in values.get("past", {}).items()}
    if residents.outcomes is not None and values.get("outcomes"):
        residents.outcomes.restore(values["outcomes"])
    residents.credits.served_version = values["served" if "served" in values else "published"]  # so in older ones
    residents.credits.due = {int(version): groups for version, groups in values["credits_due"].items()}
    residents.credits.active = sum(residents.credits.due.values())
    ledger.rounds.formed, ledger.rounds.staleness_max = values["formed"], values["staleness_max"]
    for stage in residents.readiness.stages:
        stage.waited_s, stage.num_taken = values["waits"].get(stage.name, (0.0, 0))
    for row in groups:
        group = Group(row["id"], spec.group_size, len(spec.columns), len(spec.stages))
        group.live = int.from_bytes(row["live"], "little")
        group.have = [int.from_bytes(mask, "little") for mask in row["have"]]
        group.done = [int.from_bytes(mask, "little") for mask in row["done"]]
        group.prompt_tokens, group.shared_bytes = row["prompt_tokens"], row["shared_bytes"]
        group.oldest, group.response_tokens = row["oldest"], row["response_tokens"]
        group.context_tokens = row.get("context_tokens") or group.context_tokens  # older snapshots have none
        group.row_bytes[: len(row["row_bytes"])] = row["row_bytes"]  # older snapshots have one number a sample
        residents.resume(group, Effects())  # no caller waits yet
        if lacks_source(residents, group):
            residents.drop(group, group.live, NODE_LOST, Effects())
    residents.head = min(residents.waiting, default=residents.next_group)


def write(
    cut: StoreCut, root: str, number: int, keep: int, resolve: Resolve | None, check_deadline: Callable[[], None]
) -> Path:
    """Write `ROOT/snapshot-<number>` whole or not at all, and delete all but the newest `keep`. Returns its path. Once
    all is copied, in a thread; no other thread or process writes there. `check_deadline`: called now and then; what it
    raises ends the writing."""
    parent = Path(root)
    for left in parent.glob(f".{PREFIX}*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part = parent / f".{PREFIX}{number:08d}.{uuid.uuid4().hex[:8]}.part"
    part.mkdir(parents=True)
    try:
        _write_parts(part, cut, resolve, check_deadline)
        durable.sync_tree(part)
        check_deadline()
        target = parent / f"{PREFIX}{number:08d}"
        if target.exists():
            shutil.rmtree(target)
        durable.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in snapshots(parent)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write_parts(part: Path, cut: StoreCut, resolve: Resolve | None, check_deadline: Callable[[], None]) -> None:
    """Write the files of a snapshot, the manifest last."""
    size, source = cut.spec.group_size, list(cut.spec.source_columns)
    tables = {"groups.arrow": _groups_batches(cut.ledger.groups, size)}
    source_rows = [group * size for group in cut.ledger.with_source]
    tables["source.arrow"] = _batches(cut, source_rows, source, "group_id", resolve)
    for index, (names, rows) in enumerate(sorted(cut.rows().items())):
        tables[f"rows-{index}.arrow"] = _batches(cut, rows, list(names), "row_id", resolve)
    files = {name: _write_ipc(part / name, batches, check_deadline) for name, batches in tables.items()}
    manifest = {"format": FORMAT, "fits": fingerprint(cut.spec), "ledger": cut.scalars, "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _groups_batches(groups: list[Group], size: int) -> Iterator[pa.RecordBatch]:
    """Iterate over a few hundred at a time: Arrow lets no other thread of Python run meanwhile. At least one batch."""
    for start in range(0, max(1, len(groups)), GROUPS_AT_ONCE):
        some = [values_of(group, size) for group in groups[start : start + GROUPS_AT_ONCE]]
        yield pa.RecordBatch.from_pylist(some, schema=GROUPS)


def _batches(
    cut: StoreCut, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
) -> Iterator[pa.RecordBatch]:
    """Iterate over the columns of the rows, a few hundred at a time; at least one batch, so that the file has its
    schema."""
    for start in range(0, max(1, len(rows)), ROWS_PER_BATCH):
        yield from _batches_in_limits(cut, rows[start : start + ROWS_PER_BATCH], names, id_name, resolve)


def _batches_in_limits(
    cut: StoreCut, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
) -> Iterator[pa.RecordBatch]:
    """A batch, or several where that would be too large for Arrow; each single row fits, since it came in a batch."""
    try:
        payload = gather(cut.blocks, rows, names)
        if resolve is not None:
            payload = resolve(payload)
        table = assemble(payload, names).table()
    except TooLarge:
        if len(rows) < 2:
            raise
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            yield from _batches_in_limits(cut, half, names, id_name, resolve)
        return
    ids = pa.array(payload.group_ids if id_name == "group_id" else payload.row_ids)
    columns = [table.column(name).combine_chunks() for name in names]
    yield from _halves(pa.RecordBatch.from_arrays([ids, *columns], names=[id_name, *names]))


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch, or several where it has many bytes, each with no more blobs than its own."""
    batch = pa.RecordBatch.from_arrays(list(map(compact_blobs, batch.columns)), names=batch.schema.names)
    if batch.nbytes <= BYTES_PER_BATCH or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _halves(batch.slice(0, half))
    yield from _halves(batch.slice(half))


def _write_ipc(file: Path, batches: Iterator[pa.RecordBatch], check_deadline: Callable[[], None]) -> dict[str, Any]:
    """Write batches to a file. Returns the size and checksum of what was to be written."""
    first = next(batches)
    with file.open("wb") as opened:
        summed = _ChecksummedFile(opened)
        with pa.ipc.new_file(summed, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                check_deadline()
                writer.write_batch(batch)
    return summed.facts()


class _ChecksummedFile:
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


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot that was read whole and found sound."""

    ledger: Ledger
    source: list[pa.RecordBatch]
    """Batches of `group_id`, then the source's columns."""
    rows: list[pa.RecordBatch]
    """Batches of `row_id`, then some columns."""


def load(path: str | Path, spec: StoreSpec) -> LoadedSnapshot:
    """Read a snapshot, or the newest one of a directory of them; nothing of it is used unless all of it is sound.

    Raises `CorruptSnapshot` that names the file at fault, and `StoreError` if it is of another dataflow.
    """
    path = _snapshot_at(path)
    manifest = _manifest(path)
    if manifest["fits"] != fingerprint(spec):
        raise StoreError(
            f"{path} is of another dataflow: {_difference(manifest['fits'], fingerprint(spec))}. Restore it with the "
            "configuration that wrote it."
        )
    check(path)
    groups = _read_ipc(path / "groups.arrow")
    ledger = Ledger(spec)
    restore(ledger, manifest["ledger"], pa.Table.from_batches(groups).to_pylist())
    rows = [batch for name in manifest["files"] if name.startswith("rows-") for batch in _read_ipc(path / name)]
    return LoadedSnapshot(ledger, _read_ipc(path / "source.arrow"), rows)


def refill(blocks: BlockIndex, loaded: LoadedSnapshot, block_of: Callable[[pa.RecordBatch], ValueBlock]) -> None:
    """Put the values of a snapshot into an empty index. `block_of`: keeps a batch."""
    for batch in loaded.source:
        values = batch.select(batch.schema.names[1:])
        block = block_of(values)
        for position, group in enumerate(batch.column(0).to_pylist()):
            blocks.add_group(group, block, position, values.schema.names)
    for batch in loaded.rows:
        values = batch.select(batch.schema.names[1:])
        row_ids = batch.column(0).to_pylist()
        blocks.add_rows(row_ids, range(len(row_ids)), block_of(values), values.schema.names)


def check(path: str | Path) -> None:
    """Read a snapshot, or the newest one of a directory of them, to its end. Raises `CorruptSnapshot` that names the
    first file at fault, and `StoreError` if there is none."""
    path = _snapshot_at(path)
    for name, facts in _manifest(path)["files"].items():
        _check_file(path, name, facts)


def snapshots(root: str | Path) -> list[Path]:
    """Snapshots that were written to their end, newest first."""
    return sorted((path for path in Path(root).glob(f"{PREFIX}*") if (path / MANIFEST).is_file()), reverse=True)


def snapshot_files(path: str | Path) -> dict[str, tuple[int, str]]:
    """Bytes and checksum of every file of a snapshot, for a caller that copies it elsewhere. Raises
    `CorruptSnapshot`."""
    path = Path(path)
    text = (path / MANIFEST).read_bytes()
    found = {name: (int(facts["bytes"]), str(facts["xxh3_128"])) for name, facts in _manifest(path)["files"].items()}
    return found | {MANIFEST: (len(text), xxhash.xxh3_128_hexdigest(text))}


def fingerprint(spec: StoreSpec) -> dict[str, Any]:
    """Properties that a store must have in common with the one that wrote a snapshot. Bounds may differ."""
    return {
        "columns": [[column.name, column.dtype, column.shape] for column in spec.columns],
        "source_columns": list(spec.source_columns),
        "stages": [[stage.name, stage.unit, list(stage.writes)] for stage in spec.stages],
        "group_size": spec.group_size,
    }


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    key = next(key for key in here if there.get(key) != here[key])
    return f"its {key} are {there.get(key)}, this run's {here[key]}"


def _read_ipc(file: Path) -> list[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source:
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _snapshot_at(path: str | Path) -> Path:
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if not (found := snapshots(path)):
        raise StoreError(f"{path}: there is no snapshot. A snapshot is a directory {PREFIX}N with a manifest.json.")
    return found[0]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise StoreError(f"{path}: format {manifest['format']}, and this release reads format {FORMAT}.")
        return dict(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, MANIFEST, f"is no manifest ({error})") from None


def _check_file(path: Path, name: str, facts: dict[str, Any]) -> None:
    try:
        file = path / checked(name)
    except OutsideName as error:
        raise _corrupt(path, MANIFEST, f"names a file that is none of it: {error}") from None
    if not file.is_file():
        raise _corrupt(path, name, "is missing")
    if file.stat().st_size != facts["bytes"]:
        raise _corrupt(path, name, f"has {file.stat().st_size} bytes instead of {facts['bytes']}")
    if _digest(file) != facts["xxh3_128"]:
        raise _corrupt(path, name, "does not have the checksum that it was written with")


def _corrupt(path: Path, name: str, problem: str) -> CorruptSnapshot:
    older = [other for other in snapshots(path.parent) if other.name < path.name]
    way_out = f"The one before is {older[0]}." if older else "There is none before it."
    return CorruptSnapshot(f"{path / name} {problem}. {way_out}")


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()
