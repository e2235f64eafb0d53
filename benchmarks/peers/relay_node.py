"""A node of the benchmark of weights between machines: a relay behind a listener, and a rank that writes random values.

    in   {"op": "plan", "plan": JSON}                                 of `ChunkPlan`
    in   {"op": "begin", "number": n, "version": v, "receivers": [...], "addresses": {node: [host, port]}}
    in   {"op": "step", "rate": x}                                    values move by so much, this way or that
    in   {"op": "write", "version": v, "rank": r, "anew": true}       as a rank publishes: reported while it writes
    in   {"op": "wait", "version": v}                                 until all of it is here
    in   {"op": "stats"}
    in   {"op": "usage"}                                              processor time of this process so far, in s
    out  {...}                                                        counters, or nothing

The parent takes the times: machines have clocks of their own.
"""

import argparse
import resource
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.peers.channel import Channel
from penstock.network.connection import Address
from penstock.network.listener import Listener
from penstock.workers.node.node_agent import CHUNKS
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan
from penstock.workers.weights.chain.relay import Relay, Reporter
from penstock.workers.weights.publication.publication import PublicationWriter

TOKEN = bytes(32)
"""Token of no run: everything here ends with its machines."""
WAIT_S = 300.0
SPREAD = 0.02
"""Standard deviation of weights, as models begin."""


class Node:
    def __init__(self, name: str, host: str, root: Path, lanes: int | None = None, *, whole: bool = False) -> None:
        self._root = root
        self.relay = Relay(root, name, TOKEN, CHUNKS, most_lanes=lanes, sends_differences=not whole)
        self.listener = Listener(host, TOKEN, {CHUNKS: self.relay.serve})
        self._plan: ChunkPlan | None = None
        self._values: dict[int, torch.Tensor] = {}

    def plan(self, request: dict[str, Any]) -> dict[str, Any]:
        self._plan = msgspec.json.decode(request["plan"], type=ChunkPlan)
        self.relay.plan(self._plan)
        return {}

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        addresses = {node: Address(*address) for node, address in request["addresses"].items()}
        self.relay.begin(Broadcast(request["number"], request["version"], request["receivers"], addresses))
        return {}

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        plan, version, rank = self._plan, request["version"], request["rank"]
        assert plan is not None
        with Reporter(self._root, plan, version, rank) as reporter:
            writer = PublicationWriter(self._root, version, plan.layout, rank, outlet=reporter.outlet)
            for chunk in plan.chunks:
                if chunk.rank == rank:
                    values = self._random(chunk.num_elements, version if request.get("anew", True) else 0)
                    writer.write_elements(chunk.name, chunk.first_element, values)
            writer.close()
            reporter.finish()
        return {}

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Move each value by a learning rate: as far as the first step of Adam goes; later ones go less far."""
        for values in self._values.values():
            values += request["rate"] * (2 * torch.randint(2, values.shape) - 1)
        return {}

    def wait(self, request: dict[str, Any]) -> dict[str, Any]:
        self.relay.wait(request["version"], WAIT_S)
        return self.stats(request)

    def stats(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.relay.stats()

    def usage(self, _: dict[str, Any]) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"user_s": used.ru_utime, "system_s": used.ru_stime}

    def _random(self, count: int, version: int) -> torch.Tensor:
        """Values that are the same for all chunks of a size, and others in each version: making them is not what is
        measured."""
        if count not in self._values:
            self._values[count] = SPREAD * torch.randn(count)
        return self._values[count].add_(version) if version else self._values[count]


def main() -> None:
    channel = Channel()
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--whole", action="store_true", help="send no differences")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    node = Node(arguments.name, arguments.host, arguments.root, arguments.lanes, whole=arguments.whole)
    channel.send({"ready": True, "address": [node.listener.address.host, node.listener.address.port]})
    for request in channel.requests():
        channel.send(getattr(node, request["op"])(request))
    node.relay.close()
    node.listener.close()


if __name__ == "__main__":
    main()
