"""Penstock's store at scale, op by op: the same protocol as `penstock_store.py`.

    in   {"op": "control", "consumers": C, "seconds": s, "rows": R}
    out  {"rows": n, "seconds": s, "latencies_ms": [...], "cpu_share": [of each part's process]}
    in   {"op": "spill", "memory_mib": m, "times": k, "rows_mib": r}
    out  {"bytes": n, "put_s": s, "read_s": s, "spilled_bytes": n}

control  R rows are put; then C consumers, each with a connection of its own to every part, in two processes: lease one
         row, write one number, and again. What is measured is calls and decisions, since rows carry next to nothing
spill    k times m MiB of rows are put before any read; then all are read, checked, and ended
"""

import asyncio
import itertools
import os
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
import xxhash

from benchmarks.peers.channel import Channel
from penstock.algorithms.graph.columns import STANDARD_COLUMNS
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_actor import create_store_actor, end_store_actor
from penstock.store.spec import StageSpec, StoreSpec

Request = dict[str, Any]
GROUPS_PER_STEP = 64
WARM_S = 2.0
"""Seconds that are not counted."""


def make_spec(group_size: int, shared_bytes: int = 2**30) -> StoreSpec:
    return StoreSpec(
        columns=tuple(STANDARD_COLUMNS[name] for name in ("prompt_ids", "reward")),
        source_columns=("prompt_ids",),
        stages=(
            StageSpec("reward", "sample", ("prompt_ids",), ("reward",)),
            StageSpec("train", "batch", ("reward",), ()),
        ),
        group_size=group_size,
        groups_per_step=GROUPS_PER_STEP,
        max_active_groups=10**9,
        max_staleness=10**9,
        max_bytes=2**40,
        shared_bytes=shared_bytes,
        strict=False,
    )


class Consumers:
    """Many consumers in one process."""

    async def connect(self, store: Any, count: int) -> None:
        self.clients = [StoreClient(store) for _ in range(count)]
        for client in self.clients:
            await client.spec()

    async def consume(self, start: float, end: float) -> list[float]:
        """Latencies, in ms, of what was begun after `start` and ended before `end`; both in seconds since the epoch."""
        latencies: list[float] = []

        async def one(client: StoreClient, number: int) -> None:
            while (asked := time.time()) < end:
                lease = await client.lease("reward", 1, f"consumer-{number}")
                if lease is None:
                    return
                await client.write(lease, lease.rows.row_ids, {"reward": [1.0] * len(lease.rows)})
                if start <= asked and time.time() < end:
                    latencies.append(1000 * (time.time() - asked))

        await asyncio.gather(*(one(client, number) for number, client in enumerate(self.clients)))
        return latencies


async def control(request: Request, number: int) -> Request:
    store = create_store_actor(make_spec(8), f"control-{number}")
    processes = [ray.remote(num_cpus=0, max_concurrency=2000)(Consumers).remote() for _ in range(2)]
    client = StoreClient(store)
    try:
        group = {"prompt_ids": np.arange(4, dtype=np.int32)}
        for _ in range(request["rows"] // 8 // 512):
            await client.put_groups([group] * 512)
        share = request["consumers"] // len(processes)
        await asyncio.gather(*(process.connect.remote(store, share) for process in processes))
        start = time.time() + WARM_S
        end = start + request["seconds"]
        running = [process.consume.remote(start, end) for process in processes]
        await asyncio.sleep(start - time.time())
        before = await cpu_seconds(client)
        await asyncio.sleep(end - time.time())
        cpu_share = (await cpu_seconds(client) - before) / request["seconds"]
        if not (await client.describe())["rows"]["reward"]["free"]:
            return {"error": f"{request['rows']} rows were not enough: consumers waited"}
        await client.close("enough")
        latencies = [value for some in await asyncio.gather(*running) for value in some]
        return {
            "rows": len(latencies),
            "seconds": request["seconds"],
            "latencies_ms": latencies,
            "cpu_share": cpu_share,
        }
    finally:
        for process in processes:
            ray.kill(process)
        end_store_actor(store)


async def cpu_seconds(client: StoreClient) -> float:
    """CPU seconds of the store's process so far."""
    return float((await client.describe())["process"]["cpu_s"])


async def spill(request: Request, number: int) -> Request:
    memory = request["memory_mib"] * 2**20
    store = create_store_actor(make_spec(1, memory), f"spill-{number}")
    client = StoreClient(store)
    row = request["rows_mib"] * 2**20 // 4
    count = int(request["times"] * request["memory_mib"] // request["rows_mib"])
    values = np.arange(row, dtype=np.int32)
    digests: list[int] = []
    try:
        await client.spec()
        began = time.perf_counter()
        for index in range(count):
            rows = values + index
            digests.append(xxhash.xxh3_64_intdigest(rows))
            await client.put_groups([{"prompt_ids": rows}])
        put_s = time.perf_counter() - began
        spilled = (await client.stats())["store/spilled_bytes"]
        began = time.perf_counter()
        for index in range(count):
            lease = await client.lease("reward", 1, "reader")
            assert lease is not None
            if xxhash.xxh3_64_intdigest(lease.rows.arrays("prompt_ids")[0]) != digests[index]:
                return {"error": f"row {index} came back changed"}
            await client.drop(lease, lease.rows.row_ids, "read")
        read_s = time.perf_counter() - began
        return {"bytes": count * row * 4, "put_s": put_s, "read_s": read_s, "spilled_bytes": spilled}
    finally:
        end_store_actor(store)


async def main() -> None:
    channel = Channel()
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    channel.send({"ready": True})
    numbers = itertools.count(1)
    await channel.serve(lambda request: {"control": control, "spill": spill}[request["op"]](request, next(numbers)))
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
