"""`Agent-<address>`: the Ray shell around a node's agent. Started on every node of a run by
`orchestrator/node_agents.py`, before anything that writes into shared memory, and ended after it.
"""

import asyncio

import ray

from penstock.workers.node import agent
from penstock.workers.node.agent import NodeFacts


class NodeAgent:
    """Lifecycle: `facts` once it is there, `run` for whoever wants to hear of its end, `close`."""

    def __init__(self, root: str, token: bytes, ports: tuple[int, int] | None) -> None:
        """`ports`: first and last; None: any."""
        span = range(ports[0], ports[1] + 1) if ports is not None else range(1)
        self._agent = agent.NodeAgent(root, ray.util.get_node_ip_address(), token, span)
        self._closed = asyncio.Event()

    async def facts(self) -> NodeFacts:
        return self._agent.facts

    async def run(self) -> None:
        """Returns when it is closed: a call that fails before says that the node, or the agent, is gone."""
        await self._closed.wait()

    async def stats(self) -> dict[str, float]:
        return self._agent.stats()

    async def close(self) -> None:
        """Remove the run's directory of this node."""
        await asyncio.to_thread(self._agent.close)
        self._closed.set()
