"""Longest time that one call holds the store's event loop, in which no other is served, with 10^5 and 10^6 rows
resident.

    .venv/bin/python -m benchmarks.store_holds --json holds.json

One store in this process, with its segments and Python's collector as its actor sets it. Half of the rows have
responses, one segment is there for every 100 rows. Beside each call a task runs in every turn of the loop: the hold is
the longest time between two of its turns. It is given as CPU time of the loop's thread, which other work on the machine
does not change; the time by the clock, in which the loop also waits for Python's lock and for its turn on a core, is
beside it.
"""

import asyncio
import gc
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import Target, memory_folder, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.store import ledger_spec
from penstock.metering.meters import Meters
from penstock.network.connection import Address
from penstock.store.client.store_client import StoreClient
from penstock.store.data.codec import InlineBatch, SegmentRef, SentBatch
from penstock.store.data.remote_rows import RowsNode, RowsNodes
from penstock.store.data.segment_files import Arena
from penstock.store.data.segments import Segments
from penstock.store.ledger.group import Facts
from penstock.store.service.store import Store
from penstock.store.service.store_actor import GC_THRESHOLD
from penstock.store.service.store_stats import StoreMeter
from tests.store.invariants import check_invariants

SIZE, PUT, SOME = 8, 512, 64
"""Samples of a group; groups of a put while it is filled, and of a call that is measured."""
ROWS_OF_A_SEGMENT = 100
LARGE_MIB = 64
"""Size of a batch that does not fit the budget of shared memory any more, in MiB."""
MOST_MS = 20.0
Hold = tuple[float, float]
Measured = dict[str, Hold]


class Probe:
    """A probe of the longest time between two turns of the loop."""

    async def hold_ms(self, call: Callable[[], Awaitable[Any]]) -> Hold:
        """Measure a call, by the thread's CPU time, and by the clock."""
        self._longest, self._last = [0.0, 0.0], _times()
        watching = asyncio.ensure_future(self._watch())
        await asyncio.sleep(0)
        await call()
        await asyncio.sleep(0)
        watching.cancel()
        cpu_s, clock_s = self._longest
        return 1000 * cpu_s, 1000 * clock_s

    async def _watch(self) -> None:
        self._last = _times()
        while True:
            await asyncio.sleep(0)
            now = _times()
            self._longest = [max(most, b - a) for most, a, b in zip(self._longest, self._last, now, strict=True)]
            self._last = now


def _times() -> tuple[float, float]:
    return time.thread_time(), time.perf_counter()


class Collections:
    """A watch for the longest look of Python's collector for cycles, from its making to `close`."""

    def __init__(self) -> None:
        self.longest_ms, self._began = (0.0, 0.0), _times()
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, _: dict[str, int]) -> None:
        now = _times()
        if phase == "start":
            self._began = now
        else:
            cpu_s, clock_s = (after - before for before, after in zip(self._began, now, strict=True))
            self.longest_ms = max(self.longest_ms, (1000 * cpu_s, 1000 * clock_s))

    def close(self) -> None:
        gc.callbacks.remove(self._hear)


class Filled:
    """A store with so many rows. Lifecycle: `fill`, then any calls, `end`."""

    def __init__(self, folder: Path, nodes: RowsNodes) -> None:
        self.folder = folder
        self.segments = Segments(str(folder / "shm"), str(folder / "disk"), 2**40, nodes)
        self.store = Store(ledger_spec(SIZE), segments=self.segments)
        self.meter = StoreMeter(self.store.ledger, Meters())
        self.client = StoreClient(self.store)
        self._names = itertools.count()

    async def fill(self, num_rows: int) -> None:
        num_large = num_rows // ROWS_OF_A_SEGMENT
        await self.put_large(num_large, 2048)
        await self.put(num_rows // SIZE - num_large)
        while self.store.ledger.counters["completed/rollout"] < num_rows // 2:
            await self.sample(min(PUT, num_rows // SIZE // 8))
        for stage in ("reward", "advantage"):
            lease = await self.client.lease(stage, 50 * PUT, "worker")
            assert lease is not None
            column = {"reward": "reward", "advantage": "advantage"}[stage]
            await self.client.write(lease, lease.rows.row_ids, {column: np.zeros(len(lease.rows), np.float32)})

    async def put(self, num_groups: int) -> None:
        values = {"prompt_ids": [1, 2, 3], "task": "{}"}
        for start in range(0, num_groups, PUT):
            await self.client.put_groups([values] * min(PUT, num_groups - start))

    async def sample(self, num_groups: int = PUT) -> None:
        lease = await self.client.lease("rollout", num_groups, "engine")
        assert lease is not None
        count = len(lease.rows)
        tokens = [np.zeros(4, np.int32)] * count
        values = {
            "response_ids": tokens, "response_text": ["four"] * count, "finish_reason": ["stop"] * count,
            "behavior_logprobs": [np.zeros(4, np.float32)] * count, "token_versions": tokens,
        }  # fmt: skip
        await self.client.write(lease, lease.rows.row_ids, values)

    def writer(self, node: str = "") -> tuple[str, Arena]:
        name = f"writer{next(self._names)}"
        self.segments.add_client(name, lambda: None, node)
        return name, Arena((str(self.segments.directory), str(self.segments.spill)), name)

    async def put_large(self, num_segments: int, num_bytes: int, node: str = "") -> str:
        """Put groups, each with a segment. Returns the writer's name."""
        name, arena = self.writer(node)
        batch = pa.record_batch(
            {
                "prompt_ids": pa.array([np.zeros(num_bytes // 4, np.int32)], pa.list_(pa.int32())),
                "task": pa.array(["{}"]),
            }
        )
        for number in range(num_segments):
            placed = arena.place(batch) if not node else SegmentRef(f"{name}-{number}", 0, 1, (), num_bytes, node)
            await self.put_sent(name, placed)
        return name

    async def put_sent(self, client: str, sent: SentBatch) -> None:
        facts = Facts([64], None, None, [8])
        await self.store.put(["prompt_ids", "task"], sent, facts, client, [])

    async def step(self) -> None:
        number = self.store.ledger.rounds.formed
        lease = await self.client.lease_shared("train", number, 0, 1)
        assert lease is not None
        await self.client.complete_shared(lease.share)
        await self.client.served(number + 1)

    async def end(self) -> None:
        await self.store.end()


async def measure(num_rows: int, folder: Path) -> Measured:
    """Measure the holds, by kind of call."""
    far = RowsNode("far", ("/nowhere", "/nowhere"), Address("127.0.0.1", 1))
    filled = Filled(folder, RowsNodes({"far": far}, b"token"))
    store, client = filled.store, filled.client
    collections = Collections()
    await filled.fill(num_rows)
    hold = Probe().hold_ms
    found = {f"put of {SOME} groups": await hold(lambda: filled.put(SOME))}
    found[f"lease and write of {SOME} groups"] = await hold(lambda: filled.sample(SOME))
    found["a step of 64 rows"] = await hold(filled.step)
    found["cut"] = await hold(client.cut)
    found["lease and write after a cut"] = await hold(lambda: filled.sample(SOME))
    found["snapshot of the cut"] = await hold(lambda: client.snapshot(str(folder / "snapshots"), 1))
    found["snapshot"] = await hold(lambda: client.snapshot(str(folder / "snapshots"), 2))
    found["describe"] = await hold(client.describe)
    found["stats"] = await hold(client.stats)
    found["work"] = await hold(client.work)

    async def look() -> None:
        filled.meter.look()

    found["the meter's look"] = await hold(look)
    leaving = [filled.writer()[0] for _ in range(4)]

    async def leave() -> None:
        await asyncio.gather(*map(store.left, leaving))
        await asyncio.sleep(0.2)

    found["four clients leave"] = await hold(leave)
    name, arena = filled.writer()
    large = np.zeros(LARGE_MIB * 2**18, np.int32)
    batch = pa.record_batch({"prompt_ids": pa.array([large], pa.list_(pa.int32())), "task": pa.array(["{}"])})
    filled.segments.book.max_bytes = 0
    placed = arena.place(batch)
    found[f"{LARGE_MIB} MiB moved to disk"] = await hold(lambda: filled.put_sent(name, placed))
    found[f"{LARGE_MIB} MiB by value"] = await hold(lambda: filled.put_sent("", InlineBatch(batch)))
    filled.segments.book.max_bytes = 2**40
    kinds = tuple((column, str(kind), ()) for column, kind in zip(batch.schema.names, batch.schema.types, strict=True))
    name, _ = filled.writer("far")
    for number in range(num_rows // ROWS_OF_A_SEGMENT):
        await filled.put_sent(name, SegmentRef(f"{name}-{number}", 0, 1, kinds, 2048, "far"))
    found["a node is lost"] = await hold(lambda: store.lost("far"))
    collections.close()
    found["Python's collector"] = collections.longest_ms
    check_invariants(store.ledger)
    await filled.end()
    return found


def print_measured(measured: dict[int, Measured]) -> None:
    title = "Longest hold of the loop, ms: CPU time (by the clock)"
    table = new_table(title, ["call"], [f"{rows:,} rows" for rows in measured])
    for call in next(iter(measured.values())):
        table.add_row(call, *("{:.1f} ({:.0f})".format(*found[call]) for found in measured.values()))
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    gc.set_threshold(*GC_THRESHOLD)
    sizes = [10_000] if arguments.quick else [100_000, 1_000_000]
    measured: dict[int, Measured] = {}
    for num_rows in sizes:
        with (
            memory_folder() as shm,
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as disk,
        ):
            (shm / "disk").symlink_to(disk)
            found = [asyncio.run(measure(num_rows, shm / f"{i}")) for i in range(arguments.rounds or 1)]
        measured[num_rows] = {call: max(one[call] for one in found) for call in found[0]}
    print_measured(measured)
    targets = [
        Target(
            f"{rows:,} rows: the longest, {max(found, key=found.__getitem__)}",
            max(found.values())[0],
            "ms",
            "<=",
            MOST_MS,
        )
        for rows, found in measured.items()
    ]
    print_targets(targets)
    write_json(arguments.json, "store_holds", [{"rows": rows, **found} for rows, found in measured.items()], targets)


if __name__ == "__main__":
    main()
