"""A process of the benchmark of rows between machines: the store, or a client of it, and what serves its node's rows.

    in   {"op": "open_store", "nodes": {id: {...}}, "tokens": T}         here: where it is called
    in   {"op": "connect", "endpoint": {...}, "nodes": {id: {...}}, "node": id}
    in   {"op": "put", "rows": N, "batch": B, "tokens": T}               rows of T tokens, B at a time
    in   {"op": "read", "rows": N, "batch": B}                           leases of B rows, each token looked at
    out  {"bytes": n, "seconds": s}

Clocks are each machine's own.
"""

import argparse
import asyncio
import os
import tempfile
import time
from typing import Any

import msgspec
import numpy as np

from benchmarks.peers.channel import Channel
from penstock.algorithms.graph.columns import STANDARD_COLUMNS
from penstock.network.connection import Address
from penstock.network.listener import Listener
from penstock.store.client.store_client import StoreClient
from penstock.store.data.remote_rows import ROWS, RowsNode, RowsNodes, RowsServer
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint, StorePort
from penstock.store.spec import StageSpec, StoreSpec

TOKEN = bytes(32)
"""Token of no run: everything here ends with its machines."""
ROOT = "/dev/shm/penstock-bench-rows"
BATCHES_AHEAD = 4
Request = dict[str, Any]

SPEC = StoreSpec(
    columns=tuple(STANDARD_COLUMNS[name] for name in ("prompt_ids", "response_ids", "reward")),
    source_columns=("prompt_ids", "response_ids"),
    stages=(
        StageSpec("reward", "sample", ("response_ids",), ("reward",)),
        StageSpec("train", "batch", ("reward",), ()),
    ),
    group_size=1,
    groups_per_step=1,
    max_active_groups=10**9,
    max_staleness=10**9,
    strict=False,
)


class Node:
    def __init__(self, number: str, host: str) -> None:
        self._host = host
        os.makedirs(ROOT, exist_ok=True)
        places = ROOT, os.path.join(tempfile.gettempdir(), "penstock-bench-rows")
        self.rows = RowsServer(places, takes_orders=True)
        self.listener = Listener(host, TOKEN, {ROWS: self.rows.serve})
        self.facts = RowsNode(number, places, self.listener.address)
        self._prompt = np.arange(32, dtype=np.int32)

    async def answer(self, request: Request) -> Request:
        answer: Request = await getattr(self, request["op"])(request)
        return answer

    async def open_store(self, request: Request) -> Request:
        nodes = nodes_of(request)
        spill = os.path.join(tempfile.gettempdir(), "penstock-bench-store-disk")
        segments = Segments("/dev/shm/penstock-bench-store", spill, SPEC.shared_bytes, nodes)
        self.store = Store(SPEC, segments=segments, node="1", port=StorePort(self._host, TOKEN))
        endpoint = await self.store.endpoint()
        assert endpoint.address is not None
        return {"endpoint": [endpoint.path, list(endpoint.segments), endpoint.address.port, endpoint.address.host]}

    async def connect(self, request: Request) -> Request:
        path, segments, port, host = request["endpoint"]
        endpoint = Endpoint("1", path, tuple(segments), Address(host, port), TOKEN, nodes_of(request))
        self.client = StoreClient(endpoint, node=request["node"])
        await self.client.spec()
        return {}

    async def put(self, request: Request) -> Request:
        response = np.random.default_rng(0).integers(0, 30_000, request["tokens"], dtype=np.int32)
        group = {"prompt_ids": self._prompt, "response_ids": response}
        for _ in range(request["rows"] // request["batch"]):
            await self.client.put_groups([group] * request["batch"])
            while (await self.client.stats())["store/rows"] > BATCHES_AHEAD * request["batch"]:
                await asyncio.sleep(0.005)
        return {}

    async def read(self, request: Request) -> Request:
        num_rows = num_bytes = 0
        started = time.perf_counter()
        async with self.client.leases("reward", max_units=request["batch"], owner="reader", ahead=2) as leases:
            async for lease in leases:
                num_bytes += lease.rows.ragged("response_ids")[0].nbytes
                num_rows += len(lease.rows)
                await self.client.drop(lease, lease.rows.row_ids, "read")
                if num_rows == request["rows"]:
                    break
        return {"bytes": num_bytes, "seconds": time.perf_counter() - started}


def nodes_of(request: Request) -> RowsNodes:
    return RowsNodes(msgspec.convert(request["nodes"], dict[str, RowsNode]), TOKEN)


def main() -> None:
    channel = Channel()
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", required=True)
    parser.add_argument("--host", required=True)
    arguments = parser.parse_args()
    node = Node(arguments.number, arguments.host)
    channel.send({"ready": True, "facts": msgspec.to_builtins(node.facts)})
    asyncio.run(channel.serve(node.answer))
    node.listener.close()


if __name__ == "__main__":
    main()
