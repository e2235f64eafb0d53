"""In-memory checkpoints of trainers (`workers/trainer/memory_checkpoint.py`), sent from node to node: a rank's copies on
a second node, in case its own is lost.

    partner's node: fetch(trainer, {rank: step}, source)        the rank's node: serve
          begin a slot ◀── TCP: header, then the bytes by sendfile ── the slot that has the step
          each block against its checksum ─▶ seal

The same paths on both nodes, and the same two slots in turn: what was brought before stays whole until the next is. A
rank goes on while its copy is sent. A copy that it writes over meanwhile fails its checksums, and the next step's is
fetched instead.
"""

import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from penstock.conf.errors import MemoryCheckpointError
from penstock.network.connection import Address, Connection, connect
from penstock.network.names import OutsideName, checked
from penstock.workers.trainer.memory_slots import (
    Header,
    Slots,
    complete_steps,
    copied_ranks,
    from_json,
    keep_only,
    reserve_slots,
    to_json,
)
from penstock.workers.weights.publication.publication_files import WritableMappings

STATES = 4
"""Service of an agent's port. `agent.py` has all of them."""
FOUND, MISSING = 1, 2
"""Kinds of answers."""
CONNECT_S = 30.0
STREAMS = 4
"""Ranks whose copies are fetched at the same time: a connection each, and a thread that sums."""


def partners(nodes: Sequence[str], node_of_rank: Mapping[int, str]) -> dict[int, str]:
    """The node that has a second copy of each rank's state: the next after its own, in the order of `nodes`, which
    wraps around; none where there is no other.

    `nodes`: those that live, each with shared memory of its own. So each node has the copies of one other's ranks, and
    losing any one node loses no rank's state.
    """
    if len(nodes) < 2:
        return {}
    place = {node: number for number, node in enumerate(nodes)}
    return {rank: nodes[(place[node] + 1) % len(nodes)] for rank, node in node_of_rank.items()}


class StateService:
    """Lifecycle: any calls in any order, `serve` for each connection, `close`. Any thread; one `fetch` at a time."""

    def __init__(self, root: Path, token: bytes) -> None:
        """`root`: the directory that has a folder for each trainer."""
        self._root, self._token = root, token
        self._mappings = WritableMappings()
        self._fetching = threading.Lock()
        self.received_bytes = 0

    def there(self, trainer: str) -> dict[int, list[int]]:
        """Steps whose whole copies this node has, by rank."""
        folder = self._folder(trainer)
        found = {rank: complete_steps(folder, rank) for rank in copied_ranks(folder)}
        return {rank: steps for rank, steps in found.items() if steps}

    def fetch(self, trainer: str, copies: Mapping[int, int], source: Address) -> None:
        """Bring a step of each rank here, from the node whose agent listens at `source`. What is here already stays as
        it is. Raises `MemoryCheckpointError`; what was brought of other ranks, and what was here, is whole all the
        same."""
        with self._fetching, ThreadPoolExecutor(STREAMS) as threads:
            futures = [threads.submit(self._fetch, trainer, rank, step, source) for rank, step in copies.items()]
        for future in futures:
            future.result()

    def keep_only(self, trainer: str, ranks: Collection[int], up_to: int) -> None:
        """Remove copies of other ranks and of later steps."""
        keep_only(self._folder(trainer), ranks, up_to)
        self._mappings.unmap_stale(self._root)

    def serve(self, connected: socket.socket) -> None:
        """Serve a connection of another agent, until it ends."""
        with Connection(connected) as connection:
            try:
                while True:
                    trainer, rank, step = msgspec.msgpack.decode(connection.receive().body, type=tuple[str, int, int])
                    self._send(connection, Slots(self._folder(trainer), rank), step)
            except (OSError, msgspec.MsgspecError, MemoryCheckpointError):
                return  # it has what it wanted, or is gone

    def close(self) -> None:
        self._mappings.close()

    def _send(self, connection: Connection, slots: Slots, step: int) -> None:
        copies = slots.copies()
        if step not in copies:
            connection.send(MISSING, f"it has those of steps {sorted(copies)}".encode())
            return
        slot, header = copies[step]
        with slots.data(slot).open("rb", buffering=0) as file:
            connection.send(FOUND, to_json(header).encode(), header.num_bytes)
            connection.send_file(file, 0, header.num_bytes)

    def _fetch(self, trainer: str, rank: int, step: int, source: Address) -> None:
        slots = Slots(self._folder(trainer), rank)
        try:
            with connect(source, STATES, self._token, CONNECT_S) as connection:
                connection.send(0, msgspec.msgpack.encode((trainer, rank, step)))
                answer = connection.receive()
                header = from_json(answer.body) if answer.kind == FOUND else None
                if header is None or (header.rank, header.step, header.num_bytes) != (rank, step, answer.num_bytes):
                    raise OSError(f"it is not there ({answer.body[:200].decode(errors='replace')})")
                if slots.copies().get(step, (0, None))[1] != header:  # nodes that share their memory have it already
                    self._receive(connection, slots, header)
        except OSError as error:
            raise MemoryCheckpointError(
                f"the copy of rank {rank} after step {step} could not be fetched from {source} into "
                f"{slots.directory}: {error}. The one before stays until the next is fetched."
            ) from None

    def _receive(self, connection: Connection, slots: Slots, header: Header) -> None:
        if short := reserve_slots(slots, header.num_bytes, header.leave_bytes):
            raise OSError(short)
        slot = slots.begin(header.step)
        file = self._mappings.map(slots.data(slot), self._root)
        start = 0
        for block in header.blocks:
            end = start + block.num_bytes
            some = file.window(start, end)
            connection.receive_into(some)
            if len(some) != block.num_bytes or xxhash.xxh3_128_hexdigest(some) != block.checksum:
                raise OSError("it arrived damaged, or was written over while it was read")
            start = end
        if start != header.num_bytes:
            raise OSError(f"its blocks have {start:,} bytes, and it has {header.num_bytes:,}")
        self.received_bytes += start
        slots.seal(slot, header)

    def _folder(self, trainer: str) -> Path:
        try:
            return self._root / checked(trainer)
        except OutsideName as error:
            raise MemoryCheckpointError(f"{error} A trainer's is its role.") from None
