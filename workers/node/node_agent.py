"""The agent of one node: it owns the run's directory in that node's shared memory, and speaks for it to other nodes.

    <root>/weights/   publications: written by ranks, read by engines
    <root>/rows/      large batches of the store
    <root>/stacks/    stacks of the run's processes, written when they do not answer any more
    <root>/states/    in-memory checkpoints of trainers: written by ranks, and by a partner's agent

    other nodes' agents ─ TCP, the run's token ─▶ listener ─▶ the service that they ask for

The root has the same path on every node, so a path means the same file on all of them. However the agent ends, the root
is removed: by `close`, or by a separate process if the agent is killed. Plain Python; `node_actor.py` is the shell.

How fast bytes go from this node to another is measured over as many connections as a relay's lanes, a bounded amount,
once:

    measure ─ connections ─▶ frames, until MOST_BYTES or MOST_S ─▶ END ─▶ serve, which has received all ─▶ END
"""

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.conf.errors import ResourceError, SandboxUnavailable
from penstock.network.connection import Address, Connection, connect
from penstock.network.listener import Handler, Listener
from penstock.store.data import remote_rows
from penstock.store.data.remote_rows import RowsServer
from penstock.store.data.roots import OWNER_NAME, boot_id, claim_root, guard_root, remove_root, sweep_stale
from penstock.workers.node import node_transfers
from penstock.workers.node.hub_models import HubModels
from penstock.workers.node.node_transfers import FileService, StateService
from penstock.workers.runtime.processes import ProcessId, kill
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.workspace import checked_here
from penstock.workers.weights.chain.relay import Relay
from penstock.workers.weights.publication.costs import SharedMemory

WEIGHTS, ROWS, STATES, STACKS = "weights", "rows", "states", "stacks"
"""Folders of the root. That of states has a folder for each trainer."""
CHUNKS = 1
"""Service of the port for chunks of publications: `workers/weights/chain/`."""
NODE = "node"
"""File of the root with the run's name for the node whose agent has made it."""
LINKS = 5
"""Service of an agent's port, a byte."""
BYTES, END = 0, 1
"""Kinds of frames."""
LANES = 4
"""Connections: relays open one for each `LANE_BYTES` of a version (`weights/chain/plan.py`), up to a few."""
MOST_LINK_BYTES, MOST_LINK_S = 2**24, 0.5
"""Bytes of a lane, and seconds in which they are sent: whichever ends first. 64 MiB in all."""
FRAME_BYTES = 2**20
LINK_DEADLINE_S = 5.0
"""Seconds for a connection, and for each frame: a link that is slower than a frame in so long is none."""


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
        self.hub = HubModels()
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
            return measure_link(address, self._token)
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
        handlers = {node_transfers.FILES: self.files.serve, node_transfers.STATES: self.states.serve, LINKS: serve_link}
        if self.relay is None:
            return handlers
        return handlers | {CHUNKS: self.relay.serve, remote_rows.ROWS: self.rows.serve}


def serve_link(connected: socket.socket) -> None:
    """Receive what another agent sends, until it ends."""
    room = memoryview(bytearray(FRAME_BYTES))
    with Connection(connected, LINK_DEADLINE_S) as connection:
        try:
            while (frame := connection.receive()).kind == BYTES and frame.num_bytes <= FRAME_BYTES:
                connection.receive_into(room[: frame.num_bytes])
            connection.send(END)
        except OSError:
            return


def measure_link(address: Address, token: bytes) -> float:
    """Bytes a second to the node whose agent listens there. Raises `OSError`."""
    with ExitStack() as open_ones, ThreadPoolExecutor(LANES) as threads:
        lanes = [
            open_ones.enter_context(connect(address, LINKS, token, LINK_DEADLINE_S, LINK_DEADLINE_S))
            for _ in range(LANES)
        ]
        began = time.perf_counter()
        sent = sum(threads.map(send_until_enough, lanes))
        return sent / (time.perf_counter() - began)


def send_until_enough(connection: Connection) -> int:
    """Send until there is enough; return how many bytes have arrived."""
    frame, sent, end = bytes(FRAME_BYTES), 0, time.perf_counter() + MOST_LINK_S
    while sent < MOST_LINK_BYTES and time.perf_counter() < end:
        connection.send(BYTES, num_bytes=len(frame))
        connection.send_bytes(frame)
        sent += len(frame)
    connection.send(END)
    connection.receive()
    return sent
