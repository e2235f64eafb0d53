"""`Agent-<address>`: the Ray shell around a node's agent. It is started on every node of a run, before anything that
writes into shared memory, and ended after it.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from penstock.network.connection import Address
from penstock.network.machine import raise_limit
from penstock.workers.machine import processes
from penstock.workers.machine.processes import ProcessId, register
from penstock.workers.node import agent
from penstock.workers.node.agent import NodeFacts
from penstock.workers.node.file_service import FileSet
from penstock.workers.node.output import Lines, Output
from penstock.workers.node.questions import Mailbox, NodeActors
from penstock.workers.protocols import Publication
from penstock.workers.sandbox.execution import Limits
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan
from penstock.workers.weights.chain.relay import Relay


class NodeAgent:
    """Lifecycle: `facts` once it is there, `run` for callers that want to know of its end, `close`."""

    def __init__(
        self, root: str, token: bytes, ports: list[int] | None, files_dir: str | None, spill_dir: str | None
    ) -> None:
        """`ports`, `files_dir`: from `conf/cluster.py`; `spill_dir`: from `conf/store.py`."""
        raise_limit()
        node = ray.get_runtime_context().get_node_id()
        span = range(ports[0], ports[1] + 1) if ports is not None else range(1)
        self._agent = agent.NodeAgent(root, node, ray.util.get_node_ip_address(), token, span, files_dir, spill_dir)
        self._closed = asyncio.Event()
        self._mailbox = Mailbox()
        self._output = Output()
        self._node_actors = NodeActors()
        self._reading = threading.Lock()

    async def facts(self) -> NodeFacts:
        return self._agent.facts

    async def run(self) -> None:
        """Wait until it is closed: a call that fails before says that the node, or the agent, is gone."""
        await self._closed.wait()

    async def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    async def progress(self) -> None:
        """Answer, as long as the actor answers any call."""

    async def ask(self, question: Any) -> Any:
        """Ask the run's controller, on the driver's node. Plain data. None: the run has ended."""
        return await self._mailbox.ask(question)

    async def take_question(self) -> tuple[int, Any]:
        """Take the next question and its number; the controller calls it."""
        return await self._mailbox.take()

    async def answer(self, number: int, answer: Any) -> None:
        """Answer a question; the controller calls it."""
        self._mailbox.answer(number, answer)

    async def plan_chunks(self, plan: ChunkPlan) -> None:
        """Take the plan of every version of the weights from now on."""
        self._relay.plan(plan)

    async def begin_version(self, broadcast: Broadcast) -> None:
        """Begin a version that is about to be written. Raises `WeightError`."""
        await asyncio.to_thread(self._relay.begin, broadcast)

    async def wait_for_version(self, version: int, timeout_s: float) -> Publication:
        """Wait for all of a version, in the form that engines of this node load. Raises `WeightError`,
        `DeadlineExceeded`."""
        return await asyncio.to_thread(self._relay.wait, version, timeout_s)

    async def reclaim_versions(self) -> None:
        """Remove publications that no engine will ask for any more."""
        await asyncio.to_thread(self._relay.reclaim)

    async def offer(self, files: FileSet, directory: str) -> None:
        """Let other nodes fetch these files."""
        self._agent.files.offer(files, Path(directory))

    async def obtain(self, files: FileSet, path: str, source: Address) -> str:
        """Return where this node has these files, once it has them. Raises `ResourceError`."""
        return await asyncio.to_thread(self._agent.files.obtain, files, Path(path), source)

    async def sees(self, path: str) -> bool:
        """Return whether this node has that path."""
        return await asyncio.to_thread(os.path.exists, path)

    async def offer_all(self, directory: str) -> FileSet:
        """Offer all files in a directory of this node, for another to collect. Raises `ResourceError`."""
        files = await asyncio.to_thread(FileSet.of_directory, Path(directory))
        self._agent.files.offer(files, Path(directory))
        return files

    async def collect(self, files: FileSet, directory: str, source: Address) -> None:
        """Bring files of another node to a directory of this one. Raises `ResourceError`."""
        await asyncio.to_thread(self._agent.files.collect, files, Path(directory), source)

    async def scratch(self) -> str:
        """Make a directory of this node for files that another is to collect. Raises `ResourceError`."""
        return str(self._agent.files.scratch())

    async def discard(self, scratch: str) -> None:
        """Remove a directory that has been collected, or will not be."""
        await asyncio.to_thread(self._agent.files.discard, Path(scratch))

    async def dump_stacks(self, process: ProcessId, name: str) -> str:
        """The stacks of all threads of an actor's process on this node, within half a minute; or why they are not
        known. 200 kB at most."""
        return await asyncio.to_thread(processes.dump, process, self._agent.root / agent.STACKS, name)

    async def take_output(self, processes: dict[str, ProcessId]) -> dict[str, Lines]:
        """Take the output of this node's members since the last call, by name. `processes`: of those that are there."""

        def take() -> dict[str, Lines]:
            with self._reading:
                return self._output.take(processes)

        return await asyncio.to_thread(take)

    async def ask_members(
        self, method: str, names: list[str], timeout_s: float, members: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Call actors of this node without arguments; return the answers by name: those that come in time and without
        an error. `members`: handles of all that are here, where that has changed."""
        if members is not None:
            self._node_actors.set(members)
        return await self._node_actors.ask(method, names, timeout_s)

    async def measure_link(self, address: Address) -> float:
        """Bytes a second from this node to that whose agent listens at an address. Raises `ResourceError`."""
        return await asyncio.to_thread(self._agent.measure_link, address)

    async def try_fences(self, all_limits: Sequence[Limits]) -> str:
        """A text that says what holds on this node for code of models. Raises `SandboxUnavailable`."""
        return await asyncio.to_thread(self._agent.try_fences, all_limits)

    async def kill(self, process: ProcessId) -> bool:
        """End an actor's process on this node and all that it has started. False if one of them will not end."""
        return await asyncio.to_thread(processes.kill, process)

    async def memory_checkpoints(self, trainer: str) -> dict[int, list[int]]:
        """Steps after which this node has whole copies of a trainer's ranks, by rank: its own ranks' and those that it
        has fetched."""
        return await asyncio.to_thread(self._agent.states.there, trainer)

    async def fetch_states(self, trainer: str, copies: dict[int, int], source: Address) -> None:
        """Bring a step of each of these ranks here, `{rank: step}`, from the node whose agent listens at `source`.
        Raises `MemoryCheckpointError`; what was here before is whole all the same."""
        await asyncio.to_thread(self._agent.states.fetch, trainer, copies, source)

    async def keep_only_states(self, trainer: str, ranks: list[int], up_to: int) -> None:
        """Remove copies of other ranks and of later steps than `up_to`: after a loss, before steps are made again."""
        await asyncio.to_thread(self._agent.states.keep_only, trainer, ranks, up_to)

    @property
    def _relay(self) -> Relay:
        assert self._agent.relay is not None  # who has none is asked for nothing
        return self._agent.relay

    async def clear_rows(self) -> None:
        """Remove all rows of the store here, because the store that knew of them is gone."""
        await asyncio.to_thread(self._agent.rows.clear)

    async def stats(self) -> dict[str, float]:
        return self._agent.stats()

    async def close(self) -> None:
        """Remove the run's directory of this node."""
        self._mailbox.close()
        await asyncio.to_thread(self._agent.close)
        self._closed.set()
