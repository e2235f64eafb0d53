"""The agent of one node: it owns the run's directory in that node's shared memory, and speaks for it to other nodes.

    <root>/weights/   publications: written by ranks, read by engines
    <root>/rows/      large batches of the store
    <root>/stacks/    stacks of the run's processes, written when they do not answer any more
    <root>/states/    in-memory checkpoints of trainers: written by ranks, and by a partner's agent

    other nodes' agents ─ TCP, the run's token ─▶ listener ─▶ the service that they ask for

The root has the same path on every node, so a process that is told of a file need not know a node's directories.
However the agent ends, the root is removed: by `close`, or by a separate process if the agent is killed. Plain Python;
`node_actor.py` is the shell.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.conf.errors import ResourceError, SandboxUnavailable
from penstock.network.connection import Address
from penstock.network.listener import Handler, Listener
from penstock.store.data.remote import nodes
from penstock.store.data.remote.server import RowsServer
from penstock.store.data.roots import OWNER_NAME, boot_id, claim_root, guard_root, remove_root, sweep_stale
from penstock.workers.machine.processes import ProcessId, kill
from penstock.workers.node import file_service, link, states
from penstock.workers.node.file_service import FileService
from penstock.workers.node.states import StateService
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import checked_here
from penstock.workers.weights.chain.relay import Relay
from penstock.workers.weights.publication.room import SharedMemory

WEIGHTS, ROWS, STATES, STACKS = "weights", "rows", "states", "stacks"
"""Folders of the root. That of states has a folder for each trainer."""
CHUNKS = 1
"""Service of the port for chunks of publications: `workers/weights/chain/`."""
NODE = "node"
"""File of the root with the run's name for the node whose agent has made it."""


@dataclass(frozen=True)
class NodeFacts:
    """The facts on a node that takes part."""

    host: str
    """Name of the node, for people."""
    address: Address
    """Address where the agent listens."""
    cores: int
    """Number of cores that this run's processes may use."""
    memory: str
    """Id of its shared memory: nodes with the same id see each other's files."""
    rows: tuple[str, str]
    """Directories of the store's large batches: shared memory, disk."""
    shared_memory: SharedMemory
    owns_root: bool = True
    """True if this agent owns the root. False: another agent of the run is there for the same shared memory, relays its
    weights and serves its rows."""


def memory_of(root: Path) -> str:
    """Id of the shared memory that `root` lies in, different from that of other machines and containers."""
    return f"{boot_id()}:{root.stat().st_dev}"


class NodeAgent:
    """Lifecycle: made at the start of a run, `close` at its end.

    `root`: the run's directory in shared memory, which must not exist. `node`: the run's name for this one. `host`: its
    address, as other nodes reach it. `ports`: of which the first free one is taken; 0: any.
    """

    def __init__(
        self,
        root: str | Path,
        node: str,
        host: str,
        token: bytes,
        ports: range = range(1),
        files_dir: str | None = None,
        spill_dir: str | None = None,
    ) -> None:
        """`files_dir`: where copies of other nodes' files are kept. `spill_dir`: where rows go that shared memory has
        no room for. None: the temporary directory.

        Raises `ResourceError` if the root cannot be made or no port is free.
        """
        self.root, self._node, self._token = Path(root), node, token
        self.files = FileService(Path(files_dir or tempfile.gettempdir()) / f"{self.root.name}-files", token)
        sweep_stale(self.root.parent)
        try:
            self._owns_root = self._make_root()
        except OSError as error:
            raise ResourceError(
                f"{platform.node()}: the run's directory {self.root} cannot be made: {error}. It lies in shared "
                "memory: see that /dev/shm is mounted, has room, and may be written to by this user."
            ) from None
        self._row_places = str(self.root / ROWS), f"{spill_dir or tempfile.gettempdir()}/{self.root.name}-rows"
        self.rows = RowsServer(self._row_places, takes_orders=True)
        self.states = StateService(self.root / STATES, token)
        self.relay = Relay(self.root / WEIGHTS, node, token, CHUNKS) if self._owns_root else None
        try:
            self.listener = Listener(host, token, self._services(), ports)
        except OSError as error:
            self._close_root()
            raise ResourceError(
                f"{platform.node()}: no port to listen on at {host} ({error}). Widen cluster.ports, or set it to null "
                "for any free port."
            ) from None

    @property
    def facts(self) -> NodeFacts:
        cores, usage = len(os.sched_getaffinity(0)), shutil.disk_usage(self.root)
        return NodeFacts(
            platform.node(), self.listener.address, cores, memory_of(self.root), self._row_places,
            SharedMemory(usage.total, usage.free), self._owns_root,
        )  # fmt: skip

    def try_fences(self, all_limits: Sequence[Limits]) -> str:
        """A text that says what holds on this node for code of models. Raises `SandboxUnavailable`, which names the
        node."""
        try:
            return checked_here(all_limits)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(f"{platform.node()}: {error}") from None

    def measure_link(self, address: Address) -> float:
        """Bytes a second to the node whose agent listens at an address. Raises `ResourceError`."""
        try:
            return link.measure(address, self._token)
        except OSError as error:
            raise ResourceError(f"{platform.node()}: the link to {address} could not be measured: {error}") from None

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        counters = self.relay.stats() if self.relay is not None else {}
        found = {f"node/weights/{name}": value for name, value in counters.items()}
        found |= {"node/rows/sent_bytes": self.rows.sent_bytes, "node/rows/failed_spills": self.rows.failed_spills}
        found |= {"node/states/received_bytes": self.states.received_bytes}
        return found | {"node/refused_connections": self.listener.refused}

    def close(self) -> None:
        """Close everything, once no process reads or writes any more. A second call changes nothing."""
        self.listener.close()
        self.files.close()
        self.states.close()
        self._close_root()

    def _make_root(self) -> bool:
        """Make the root. False if the agent of another node has made it: two Ray nodes may share a machine."""
        self._end_the_one_before()
        try:
            claim_root(self.root)
        except FileExistsError:
            if self.root.stat().st_uid != os.geteuid():
                raise
            owns = False
        else:
            guard_root(self.root)
            (self.root / NODE).write_text(self._node)
            owns = True
        for folder in (WEIGHTS, ROWS, STATES, STACKS):
            (self.root / folder).mkdir(exist_ok=True)
        return owns

    def _end_the_one_before(self) -> None:
        """End the previous agent of this node, if it is still there: the run has given it up, as it did not answer."""
        try:
            owner, node = (self.root / OWNER_NAME).read_text().split(), (self.root / NODE).read_text()
        except OSError:
            return
        if node == self._node and owner[0] != str(os.getpid()):
            kill(ProcessId(int(owner[0]), tuple(owner)))
            sweep_stale(self.root.parent)

    def _close_root(self) -> None:
        if self.relay is not None:
            self.relay.close()
            self.rows.close()
            remove_root(self.root)

    def _services(self) -> Mapping[int, Handler]:
        handlers = {file_service.FILES: self.files.serve, states.STATES: self.states.serve, link.LINKS: link.serve}
        if self.relay is None:
            return handlers
        return handlers | {CHUNKS: self.relay.serve, nodes.ROWS: self.rows.serve}
