"""Snapshots of a store on disk: written beside and renamed (`saving.py`), checked before anything is restored.

    ROOT/snapshot-00000012/
        manifest.json      format, the spec that it fits, the ledger's scalars, size and checksum of every file
        groups.arrow       the ledger's groups (`saving.GROUPS`)
        source.arrow       group, and the columns that the source wrote
        rows-0.arrow …     row, and the columns that these rows have: one file for each set of columns

Arrow IPC and JSON, no pickle: readable by anything, and nothing in it runs.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from penstock.network.names import OutsideName, checked
from penstock.store.data.blocks import Block, Blocks
from penstock.store.errors import CorruptSnapshot, StoreError
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.state import restore
from penstock.store.spec import StoreSpec

FORMAT = 2
PREFIX = "snapshot-"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Loaded:
    """A snapshot that was read whole and found sound."""

    ledger: Ledger
    source: list[pa.RecordBatch]
    """Batches of `group_id`, then the source's columns."""
    rows: list[pa.RecordBatch]
    """Batches of `row_id`, then some columns."""


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


def check(path: str | Path) -> None:
    """Read a snapshot, or the newest one of a directory of them, to its end. Raises `CorruptSnapshot` that names the
    first file at fault, and `StoreError` if there is none."""
    path = _found(path)
    for name, facts in _manifest(path)["files"].items():
        _check(path, name, facts)


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
