"""`Agent-<address>`: the Ray shell around a node's agent. It is started on every node of a run, before anything that
writes into shared memory, and ended after it. Three things pass through it:

    caller ─ ask ─▶ Mailbox ◀─ take, answer ─ controller         controller ─▶ ActorDirectory.ask ─▶ actors of the node

- Questions to the controller, which is no actor and cannot be called: they wait in the agent of the driver's node until
  the controller takes them, and the caller waits for its answer.
- The controller's calls of a node's actors, which get one answer for all of them. The controller calls actors that are
  missing from the answer itself (`orchestrator/cluster/fleet/fleet.py`).
- The output of a node's processes since the last call, for the run's directory, so that it can be read on another
  machine. The standard output and error of a process are files of Ray's, which `/proc` names.
"""

import asyncio
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from penstock.network.connection import Address
from penstock.network.host import raise_limit
from penstock.workers.node import node_agent
from penstock.workers.node.hub_models import Fetched
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.node.node_transfers import FileSet
from penstock.workers.protocols import Publication
from penstock.workers.runtime import processes
from penstock.workers.runtime.processes import ProcessId, register
from penstock.workers.sandbox.execution import Limits
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan
from penstock.workers.weights.chain.relay import Relay

MOST_BYTES = 1 << 18
"""Largest output of one file in one look. The excess is left out of the middle, and counted."""
STREAMS = {1: "out", 2: "err"}
MARKERS = re.compile(r":(actor_name|job_id|task_name):")
"""Pattern of lines that Ray writes into these files for itself."""

Lines = list[tuple[str, str]]
"""Lines, as stream and text."""


@dataclass
class _OutputFile:
    path: Path
    offset: int = 0
    rest: bytes = b""
    """Beginning of a line that is not whole yet."""

    def take(self) -> list[str]:
        """Whole lines since the last call."""
        try:
            with self.path.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                skipped = max(0, size - self.offset - MOST_BYTES)
                opened.seek(self.offset + skipped)
                data = opened.read(MOST_BYTES)
        except OSError:
            return []
        self.offset += skipped + len(data)
        if skipped:
            self.rest = b""
            data = data[data.find(b"\n") + 1 :]
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MOST_BYTES:
            whole, self.rest = [*whole, self.rest], b""
        lines = [line.decode(errors="replace") for line in whole]
        return [f"… {skipped:,} bytes left out …", *lines] if skipped else lines

    def end(self) -> list[str]:
        """Whole lines since the last call, and one that was never ended."""
        lines, rest = self.take(), self.rest
        self.rest = b""
        return [*lines, rest.decode(errors="replace")] if rest else lines


@dataclass
class _ProcessOutput:
    process: ProcessId
    files: dict[str, _OutputFile] = field(default_factory=dict)
    """Files by stream."""
    is_alive: bool = True
    """True if the process was alive at the last look."""


class NodeOutput:
    """Lifecycle: `take` now and then, from one thread at a time."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[_ProcessOutput]] = {}
        """Processes by name: several have had a name, one after the other."""
        self._newest: dict[str, _ProcessOutput] = {}
        """The last process of each name whose end nobody has asked for."""

    def take(self, processes: Mapping[str, ProcessId]) -> dict[str, Lines]:
        """Take the output of this node's members since the last call. `processes`: those that the caller knows of, by
        name. A process's last output is taken after its death, and then the process is forgotten."""
        for name, process in processes.items():
            known = self._outputs.setdefault(name, [])
            if all(one.process != process for one in known):
                known.append(_ProcessOutput(process, _files_of(process)))
                self._newest[name] = known[-1]
        found = {}
        for name in list(self._outputs):
            lines: Lines = []
            for one in self._outputs[name]:
                one.is_alive = one.process.is_alive  # asked before its last output is read
                for stream, file in one.files.items():
                    lines += [(stream, text) for text in (file.take() if one.is_alive else file.end())]
            self._outputs[name] = [
                one for one in self._outputs[name] if one.is_alive or processes.get(name) == one.process
            ]
            if not self._outputs[name]:
                del self._outputs[name]
            if kept := [(stream, text) for stream, text in lines if text and not MARKERS.match(text)]:
                found[name] = kept
        return found

    def take_end(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The last lines of members, by name, `MOST_BYTES` of a file at most: once for each process, so that nothing
        counts as the end of the next one. `take` is not affected."""
        ends = {name: self._newest.pop(name) for name in names if name in self._newest}
        return {
            name: [line for file in one.files.values() for line in _OutputFile(file.path).end()]
            for name, one in ends.items()
        }


def _files_of(process: ProcessId) -> dict[str, _OutputFile]:
    """Output files of a process. None where it prints to no file, or where this process may not look."""
    found: dict[str, _OutputFile] = {}
    if not process.is_alive:
        return found
    for number, stream in STREAMS.items():
        try:
            path = Path(os.readlink(f"/proc/{process.pid}/fd/{number}"))
        except OSError:
            continue
        if path.is_file() and all(file.path != path for file in found.values()):
            found[stream] = _OutputFile(path)
    return found


class Mailbox:
    """Questions to the controller. Lifecycle: `ask` by a caller, `take` and `answer` by the controller, `close`."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self._taking: asyncio.Task[tuple[int, Any]] | None = None

    async def ask(self, question: Any) -> Any:
        """Ask; return the answer. None: the mailbox was closed before there was one."""
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._waiting.put_nowait((number, question))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def take(self) -> tuple[int, Any]:
        """Take the next question and its number. An earlier call that still waits is cancelled: another process drives
        the run now."""
        if self._taking is not None:
            self._taking.cancel()
        self._taking = taking = asyncio.create_task(self._waiting.get())
        return await taking

    def answer(self, number: int, answer: Any) -> None:
        """Answer a question. Its caller may be gone."""
        if (asking := self._answers.get(number)) is not None and not asking.done():
            asking.set_result(answer)

    def close(self) -> None:
        for asking in self._answers.values():
            if not asking.done():
                asking.set_result(None)


class ActorDirectory:
    """The actors of a node. Lifecycle: `set` them, again whenever they change; `ask` any of them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def set(self, handles: Mapping[str, Any]) -> None:
        """Set all actors that are there now, by name."""
        self._handles = dict(handles)

    async def ask(self, method: str, names: Iterable[str], timeout_s: float) -> dict[str, Any]:
        """Call actors without arguments; return their answers. An actor that does not answer in time, fails, or is not
        known is left out; the controller learns the reason when it asks itself."""
        known = {name: handle for name in names if (handle := self._handles.get(name)) is not None}
        calls = {name: asyncio.create_task(_call(handle, method)) for name, handle in known.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        try:
            return {name: call.result() for name, call in calls.items() if call.done() and call.exception() is None}
        finally:
            for call in calls.values():
                call.cancel()


async def _call(handle: Any, method: str) -> Any:
    return await getattr(handle, method).remote()


class NodeAgentActor:
    """Lifecycle: `facts` once it is there, `run` for callers that want to know of its end, `close`."""

    def __init__(
        self, root: str, token: bytes, ports: list[int] | None, files_dir: str | None, spill_dir: str | None
    ) -> None:
        """`ports`, `files_dir`: from `conf/cluster.py`; `spill_dir`: from `conf/run.py`."""
        raise_limit()
        node = ray.get_runtime_context().get_node_id()
        span = range(ports[0], ports[1] + 1) if ports is not None else range(1)
        self._agent = node_agent.NodeAgent(
            root, node, ray.util.get_node_ip_address(), token, span, files_dir, spill_dir
        )
        self._closed = asyncio.Event()
        self._mailbox = Mailbox()
        self._output = NodeOutput()
        self._node_actors = ActorDirectory()
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

    async def keep_version(self, version: int | None) -> bool:
        """Keep a version beside the newest two; None: no other. Returns whether this node has it."""
        return await asyncio.to_thread(self._relay.keep, version)

    async def reclaim_versions(self) -> None:
        """Remove publications that no engine will ask for any more."""
        await asyncio.to_thread(self._relay.reclaim)

    async def offer(self, files: FileSet, directory: str) -> None:
        """Let other nodes fetch these files."""
        self._agent.files.offer(files, Path(directory))

    async def obtain(self, files: FileSet, path: str, source: Address) -> str:
        """Return where this node has these files, once it has them. Raises `ResourceError`."""
        return await asyncio.to_thread(self._agent.files.obtain, files, Path(path), source)

    async def fetch_model(self, name: str, revision: str | None) -> str:
        """Return the directory of a hub's model, once this node has it. Raises `ResourceError`."""
        return await asyncio.to_thread(self._agent.hub.fetch, name, revision)

    async def fetched(self) -> Fetched:
        """Bytes that have come of the model that is being fetched, and bytes that were missing."""
        return await asyncio.to_thread(self._agent.hub.fetched)

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
        return await asyncio.to_thread(processes.dump, process, self._agent.root / node_agent.STACKS, name)

    async def take_output(self, processes: dict[str, ProcessId]) -> dict[str, Lines]:
        """Take the output of this node's members since the last call, by name. `processes`: of those that are there."""

        def take() -> dict[str, Lines]:
            with self._reading:
                return self._output.take(processes)

        return await asyncio.to_thread(take)

    async def take_end(self, names: list[str]) -> dict[str, list[str]]:
        """The last lines of this node's members that have died, by name; each process's are taken once."""

        def take() -> dict[str, list[str]]:
            with self._reading:
                return self._output.take_end(names)

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
