"""Ray's own way to bring bytes from some nodes to others: `ray.put` on the ones, `ray.get` on the others.

    in   {"sources": [address], "receivers": [address], "bytes": n}   n in all, an equal share on each source
    out  {"seconds": s}                                               until every receiver has all of it

It runs on the first machine.
"""

import time
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.peers.channel import Channel


@ray.remote(num_cpus=0)
class Holder:
    """A process on a node that has put some bytes, or gets others'."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def put(self, num_bytes: int) -> list[Any]:
        self._kept = [ray.put(np.full(num_bytes, 7, np.uint8))]
        return self._kept

    def get(self, references: list[Any]) -> int:
        return sum(len(values) for values in ray.get(references))

    def let_go(self) -> None:
        self._kept = []


def main() -> None:
    channel = Channel()
    ray.init(log_to_driver=False, logging_level="ERROR")
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    holders = {
        address: Holder.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for address, node in nodes.items()
    }
    channel.send({"ready": True})
    for request in channel.requests():
        share = request["bytes"] // len(request["sources"])
        put = ray.get([holders[one].put.remote(share) for one in request["sources"]])
        references = [reference for references in put for reference in references]
        start = time.perf_counter()
        got = ray.get([holders[one].get.remote(references) for one in request["receivers"]])
        seconds = time.perf_counter() - start
        assert set(got) == {share * len(request["sources"])}
        channel.send({"seconds": seconds})
        del references
        ray.get([holder.let_go.remote() for holder in holders.values()])


if __name__ == "__main__":
    main()
