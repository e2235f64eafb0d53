"""Snapshots of a store on disk: written beside and renamed, checked before anything is restored.

    ROOT/snapshot-00000012/
        manifest.json      format, the spec that it fits, the ledger's scalars, size and checksum of every file
        groups.arrow       the ledger's groups (`data/group_table.GROUPS`)
        source.arrow       group, and the columns that the source wrote
        rows-0.arrow …     row, and the columns that these rows have: one file for each set of columns

Arrow IPC and JSON, no pickle: readable by anything, and nothing in it runs. A cut has copies of the groups and of the
index of the data (`saving.py`); the values behind it never change, so `write` may take its time in a thread while the
store goes on.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from penstock.network.names import OutsideName, checked
from penstock.store.data.blocks import Block, Blocks
from penstock.store.data.group_table import groups_batches
from penstock.store.data.payload import Payload, assemble, gather
from penstock.store.errors import CorruptSnapshot, StoreError, TooLarge
from penstock.store.ledger.group import Group, bits
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.state import restore
from penstock.store.spec import StoreSpec

FORMAT = 2
PREFIX = "snapshot-"
MANIFEST = "manifest.json"
ROWS_PER_BATCH = 256
"""Number of rows of one record batch, which memory must hold at a time, and of which a restored block consists."""

Resolve = Callable[[Payload], Payload]
"""A function that reads the segments that a payload refers to."""


@dataclass(frozen=True)
class State:
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


@dataclass(frozen=True)
class Loaded:
    """A snapshot that was read whole and found sound."""

    ledger: Ledger
    source: list[pa.RecordBatch]
    """Batches of `group_id`, then the source's columns."""
    rows: list[pa.RecordBatch]
    """Batches of `row_id`, then some columns."""


def write(root: str | Path, number: int, state: State, resolve: Resolve | None = None, *, keep: int = 2) -> Path:
    """Write `ROOT/snapshot-<number>` whole or not at all, and delete all but the newest `keep`. Returns its path."""
    root = Path(root)
    target = root / f"{PREFIX}{number:08d}"
    part = root / f".{target.name}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sync(root.parent)
    part.mkdir()
    source = list(state.spec.source_columns)
    size = state.spec.group_size
    tables = {"groups.arrow": groups_batches(state.groups, size)}
    source_rows = [group * size for group in state.with_source]
    tables["source.arrow"] = _batches(state, source_rows, source, "group_id", resolve)
    for index, (names, rows) in enumerate(sorted(state.rows().items())):
        tables[f"rows-{index}.arrow"] = _batches(state, rows, list(names), "row_id", resolve)
    files = {name: _write_ipc(part / name, batches) for name, batches in tables.items()}
    manifest = {"format": FORMAT, "fits": fingerprint(state.spec), "ledger": state.scalars, "files": files}
    _write_synced(part / MANIFEST, json.dumps(manifest, indent=1).encode())
    if target.exists():
        shutil.rmtree(target)
    _sync(part)  # before it has its name: a rename may reach the disk first
    part.rename(target)
    _sync(root)
    for old in snapshots(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


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


def check(path: str | Path) -> None:
    """Read a snapshot, or the newest one of a directory of them, to its end. Raises `CorruptSnapshot` that names the
    first file at fault, and `StoreError` if there is none."""
    path = _found(path)
    for name, facts in _manifest(path)["files"].items():
        _check(path, name, facts)


def load(path: str | Path, spec: StoreSpec) -> Loaded:
    """Read a snapshot, or the newest one of a directory of them; nothing of it is used unless all of it is sound.

    Raises `CorruptSnapshot` that names the file at fault, and `StoreError` if it is of another dataflow.
    """
    path = _found(path)
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
    return Loaded(ledger, _read_ipc(path / "source.arrow"), rows)


def refill(blocks: Blocks, loaded: Loaded, block_of: Callable[[pa.RecordBatch], Block]) -> None:
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


def _batches(
    state: State, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
) -> Iterator[pa.RecordBatch]:
    """Iterate over the columns of the rows, a few hundred at a time; at least one batch, so that the file has its
    schema."""
    for start in range(0, max(1, len(rows)), ROWS_PER_BATCH):
        yield from _fitting(state, rows[start : start + ROWS_PER_BATCH], names, id_name, resolve)


def _fitting(
    state: State, rows: Sequence[int], names: list[str], id_name: str, resolve: Resolve | None
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
    yield pa.RecordBatch.from_arrays([ids, *columns], names=[id_name, *names])


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


def _write_ipc(file: Path, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Write batches to a file. Returns the size and checksum of what was to be written."""
    first = next(batches)
    with file.open("wb") as opened:
        summed = _Summed(opened)
        with pa.ipc.new_file(summed, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
    _sync(file)
    return summed.facts()


def _read_ipc(file: Path) -> list[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source:
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _found(path: str | Path) -> Path:
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if not (found := snapshots(path)):
        raise StoreError(f"{path}: no snapshot is there. A snapshot is a directory {PREFIX}N with a manifest.json.")
    return found[0]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise StoreError(f"{path}: format {manifest['format']}, and this release reads format {FORMAT}.")
        return dict(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, MANIFEST, f"is no manifest ({error})") from None


def _check(path: Path, name: str, facts: dict[str, Any]) -> None:
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


def _write_synced(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _sync(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
