"""Small calls of the store by a client on another machine, over its own connection and as Ray's actor calls.

    in   {"way": "connection"|"ray", "in_flight": n, "seconds": s}
    out  {"calls": n, "seconds": s, "latencies_ms": [...]}

`python -m benchmarks.peers.store_calls ADDRESS`: of a Ray cluster. The client is on a node that is not the driver's.
"""

import asyncio
import os
import sys
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.peers.channel import Channel
from benchmarks.peers.penstock_store import make_spec
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.service.store_actor import create_store_actor, end_store_actor

Request = dict[str, Any]
SPEC = make_spec({"op": "put", "batch": 64})


class StoreInRay:
    """A store that is called as an actor is."""

    def __init__(self) -> None:
        self._store = Store(SPEC)

    async def renew(self, lease_ids: list[int], client: str, tickets: list[int]) -> list[int]:
        return await self._store.renew(lease_ids, client, tickets)


class Caller:
    """The client's process. Both ways it makes the same call, which the store answers at once."""

    async def connect(self, store: Any, in_ray: Any) -> None:
        self._link, self._in_ray = StoreClient(store, node="another machine").link, in_ray
        for way in ("connection", "ray"):
            await self.call({"way": way, "in_flight": 1, "seconds": 0.5})

    async def call(self, request: Request) -> Request:
        latencies: list[float] = []
        one = self._over_connection if request["way"] == "connection" else self._through_ray
        begun = time.perf_counter()
        end = begun + request["seconds"]

        async def lane() -> None:
            while (asked := time.perf_counter()) < end:
                await one()
                latencies.append(1000 * (time.perf_counter() - asked))

        await asyncio.gather(*(lane() for _ in range(request["in_flight"])))
        return {"calls": len(latencies), "seconds": time.perf_counter() - begun, "latencies_ms": latencies}

    async def _over_connection(self) -> None:
        await self._link.call("renew", [1, 2, 3], "caller", [4])

    async def _through_ray(self) -> None:
        # As cheap as an actor call is from an event loop.
        await asyncio.wrap_future(self._in_ray.renew.remote([1, 2, 3], "caller", [4]).future())


def on_another_node() -> dict[str, Any]:
    """Options of an actor that is to be on a node that is not this one."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(others[0], soft=False)}


async def main() -> None:
    channel = Channel()
    ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    store = create_store_actor(SPEC, "calls", options={"scheduling_strategy": here})
    in_ray = ray.remote(num_cpus=0)(StoreInRay).options(scheduling_strategy=here).remote()
    caller = ray.remote(num_cpus=0)(Caller).options(**on_another_node()).remote()
    try:
        await caller.connect.remote(store, in_ray)
        channel.send({"ready": True, "nodes": len(ray.nodes())})
        await channel.serve(lambda request: caller.call.remote(request))
    finally:
        end_store_actor(store)
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
