"""Pictures in the store, part of `benchmarks.store`: one for a group of eight against a copy for each row.

    python -m benchmarks.store_pictures --json pictures.json

1,000 groups have a picture of 2.2 MB each, more than 2 GiB together, and are all resident. Copies are those that a
store keeps that has no column for a group: a picture of its own for each row, of fewer groups at a time. All figures
are bytes by group: files in shared memory; what goes over TCP to a reader on another machine; memory that readers hold
with the rows of their leases. A reader on this machine maps the files and takes all rows in one lease; one elsewhere
takes the rows of 40 groups at a time. The first 16 pictures take preallocated files of 8 MiB, which counts with
`--quick`.
"""

import asyncio
import multiprocessing
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Target, memory_folder, new_table, parse_arguments, print_targets, show, write_json
from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.network.connection import new_token
from penstock.store.client.store_client import StoreClient
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint, StorePort
from penstock.store.spec import StageSpec, StoreSpec

GROUP = 8
SIZE = 2_200_000
"""Bytes of a picture."""
AT_ONCE = 40
"""Number of groups whose rows a reader elsewhere leases together."""
SHARE = 1.1 / GROUP
"""Share of the copies that a picture a group may cost: its eighth, and a tenth of that for files that are larger than
what lies in them, for notes, and for what else a reader's process allocates."""
FULL, QUICK = (1000, AT_ONCE), (80, 10)
"""Numbers of groups: with a picture, and with copies."""
COPIES = Column("copies", "binary", "list")
WAYS = ("on this machine", "elsewhere")
BASE, PAGE = 10**6, 4096
Figures = dict[str, float]


@dataclass(frozen=True)
class Reading:
    """An order to a reader."""

    endpoint: Endpoint
    stage: str
    column: str
    num_groups: int
    num_at_once: int


def spec() -> StoreSpec:
    return StoreSpec(
        columns=(STANDARD_COLUMNS["task"], STANDARD_COLUMNS["pictures"], COPIES, STANDARD_COLUMNS["reward"]),
        source_columns=("task", "pictures"),
        stages=(
            StageSpec("see", "sample", ("pictures",), ("reward",)),
            StageSpec("copy", "group", ("task",), ("copies",)),
            StageSpec("see_copies", "sample", ("copies",), ()),
            StageSpec("train", "batch", ("reward",), ()),
        ),
        group_size=GROUP,
        groups_per_step=1,
        max_active_groups=10**9,
        max_staleness=10**9,
        max_bytes=64 * 2**30,
        shared_bytes=8 * 2**30,
        lease_timeout_s=600.0,
        strict=False,
    )


def read(channel: Connection) -> None:
    """Carry out orders, in a process of its own."""

    async def one(order: Reading) -> Figures:
        client = StoreClient(order.endpoint)
        await client.spec()
        held, seconds, left, peak = _held_bytes(), 0.0, order.num_groups, 0
        while left:
            start = time.perf_counter()
            lease = await client.lease(order.stage, GROUP * min(left, order.num_at_once), "reader")
            assert lease is not None
            blobs = [blob for some in lease.rows.blobs(order.column) for blob in some]
            total = sum(int(np.frombuffer(blob, np.uint8)[::PAGE].sum()) for blob in blobs)
            seconds += time.perf_counter() - start
            assert len(blobs) == len(lease.rows)
            assert total
            peak = max(peak, _held_bytes() - held)
            left -= len(blobs) // GROUP
            if left:
                await client.drop(lease, lease.rows.row_ids, "read")
            del blobs, lease
        await client.leave()
        return {"reader_bytes": peak / min(order.num_groups, order.num_at_once), "seconds": seconds}

    while (order := channel.recv()) is not None:
        channel.send(asyncio.run(one(order)))


def _held_bytes() -> int:
    """Bytes that this process holds in memory, its own and mapped from shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return sum(1024 * int(found[name][0]) for name in ("RssAnon", "RssShmem"))


async def measure(way: str, num_groups: int, num_copied: int) -> dict[str, Figures]:
    """Figures of a reader: of pictures and of copies, by group."""
    context = multiprocessing.get_context("spawn")
    with memory_folder() as folder:
        here, there = context.Pipe()
        process = context.Process(target=read, args=(there,), daemon=True)
        process.start()
        try:
            once = await _served(folder / "once", way, here, "pictures", num_groups)
            copies = await _served(folder / "copies", way, here, "copies", num_copied)
        finally:
            here.send(None)
            process.join()
    return {"once": once, "copies": copies}


async def _served(folder: Path, way: str, reader: Connection, column: str, num_groups: int) -> Figures:
    """Put the groups into a new store, and have them read."""
    folder.mkdir()
    its_spec = spec()
    segments = Segments(str(folder / "shm"), str(folder / "disk"), its_spec.shared_bytes)
    store = Store(its_spec, segments=segments, port=StorePort("127.0.0.1", new_token()))
    endpoint = await store.endpoint()
    writer = StoreClient(endpoint)
    picture, start = np.random.default_rng(0).bytes(SIZE), time.perf_counter()
    for number in range(num_groups):
        pictures = [_numbered(picture, number)] if column == "pictures" else []
        await writer.put_groups([{"task": "{}", "pictures": pictures}])
        if column == "copies":
            lease = await writer.lease("copy", 1, "writer")
            assert lease is not None
            copies = [[_numbered(picture, BASE + int(row))] for row in lease.rows.row_ids]
            await writer.write(lease, lease.rows.row_ids, {"copies": copies})
    seconds = time.perf_counter() - start
    stage = {"pictures": "see", "copies": "see_copies"}[column]
    num_at_once = num_groups if way == WAYS[0] else min(AT_ONCE, num_groups)
    if way != WAYS[0]:  # as a machine sees it that has other directories
        endpoint = replace(endpoint, path="/not/here", segments=("/not", "/here"))
    figures = {"store_bytes": segments.book.bytes / num_groups, "written_mb_s": num_groups * SIZE / 1e6 / seconds}
    reader.send(Reading(endpoint, stage, column, num_groups, num_at_once))
    found: Figures = await asyncio.to_thread(reader.recv)
    figures |= {"reader_bytes": found["reader_bytes"], "read_rows_s": GROUP * num_groups / found["seconds"]}
    figures["sent_bytes"] = segments.rows.sent_bytes / num_groups
    await writer.leave()
    await store.end()
    return figures


def _numbered(picture: bytes, number: int) -> bytes:
    """A picture like no other."""
    return number.to_bytes(8, "big") + picture[8:]


def measure_pictures(num_groups: int, num_copied: int) -> list[dict[str, Any]]:
    """Measure both ways. `num_copied`: groups with copies."""
    return [{"way": way, **asyncio.run(measure(way, num_groups, num_copied))} for way in WAYS]


def print_pictures(rounds: list[dict[str, Any]]) -> None:
    columns = ["MB, shared memory", "MB sent", "MB, reader", "rows/s read"]
    table = new_table(f"A picture of {SIZE / 1e6:.1f} MB for {GROUP} rows, by group", ["reader", "kept"], columns)
    for one in rounds:
        for kept in ("once", "copies"):
            found = one[kept]
            numbers = (found[name] / 1e6 for name in ("store_bytes", "sent_bytes", "reader_bytes"))
            words = [f"{number:.2f}" for number in numbers]
            table.add_row(one["way"], kept, *words, f"{found['read_rows_s']:,.0f}")
    show(table, 120)


def picture_targets(rounds: list[dict[str, Any]]) -> list[Target]:
    here, elsewhere = rounds
    figures = (
        ("in shared memory", here, "store_bytes"), ("sent", elsewhere, "sent_bytes"),
        ("in a reader that maps them", here, "reader_bytes"), ("in a reader elsewhere", elsewhere, "reader_bytes"),
    )  # fmt: skip
    return [
        Target(f"pictures {where}", one["once"][name] / one["copies"][name], "of copies", "<=", SHARE)
        for where, one, name in figures
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = measure_pictures(*(QUICK if arguments.quick else FULL))
    print_pictures(rounds)
    targets = picture_targets(rounds)
    print_targets(targets)
    write_json(arguments.json, "store_pictures", rounds, targets)


if __name__ == "__main__":
    main()
