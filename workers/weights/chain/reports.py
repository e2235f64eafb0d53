"""The reports of ranks to their node's relay on the chunks that they have written, while they write: over a Unix socket
in the root.

    rank ─ hello: magic, version, rank ─ (chunk, digest)* ─ finished ─▶ relay

A connection is one rank's writing of one version, so that the kernel tells the relay of a rank that dies within it: the
connection ends before `finished` was said. Nothing is answered. `Reporter` is the rank's side, `ReportServer` the
relay's.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from penstock.conf.errors import WeightError
from penstock.network.connection import bind_path, connect_path, hang_up, is_same_user, read_exactly
from penstock.workers.weights.chain.plan import ChunkPlan
from penstock.workers.weights.chain.transfer import Transfer, TransferOver
from penstock.workers.weights.publication.layout import ElementRange, Outlet

SOCKET_NAME = "relay.sock"
HELLO = struct.Struct("!QI16s")
"""Version, rank, digest of the plan."""
REPORT = struct.Struct("!i16s")
"""Number of a chunk, and its digest."""
FINISHED = REPORT.pack(-1, bytes(16))
READ_BYTES = REPORT.size * 4096
BACKLOG = 1024
"""Ranks that may wait to connect: all of a node come at once."""
TIMEOUT_S = 30.0
"""Seconds after which a relay that takes no reports hangs, since it does nothing but listen."""


class Reporter:
    """The rank's side, for one version.

    with Reporter(root, plan, version=12, rank=0) as reporter:
        writer = PublicationWriter(root, 12, plan.layout, outlet=reporter.outlet)
        writer.write_elements(name, first, values) ...
        writer.close()
        reporter.finish()
    """

    def __init__(self, root: str | Path, plan: ChunkPlan, version: int, rank: int) -> None:
        """Connect to the node's relay. Raises `WeightError` where no relay listens."""
        self._numbers, self._rank = plan.numbers, rank
        self.outlet = Outlet(plan.chunk_bytes, plan.spans_of_node(plan.nodes[rank]), self._written)
        self._lock = threading.Lock()
        try:
            self._socket = connect_path(Path(root) / SOCKET_NAME)
        except OSError as error:
            raise self._gone(error) from None
        self._socket.settimeout(TIMEOUT_S)
        self._send(HELLO.pack(version, rank, plan.digest))

    def finish(self) -> None:
        """Report that all is written. Raises `WeightError`."""
        self._send(FINISHED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _written(self, entry: ElementRange) -> None:
        number = self._numbers.get((entry.name, entry.first_element))
        if number is None:
            raise WeightError(
                f"rank {self._rank}: elements of {entry.name!r} from {entry.first_element} are not in the plan of "
                "chunks. Ranks must have the same pieces in every version."
            )
        self._send(REPORT.pack(number, bytes.fromhex(entry.checksum)))

    def _send(self, data: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error) from None

    def _gone(self, error: OSError) -> WeightError:
        return WeightError(
            f"rank {self._rank}: this node's relay takes no reports of what is written ({error}). Its agent has ended, "
            "or the version is no longer wanted."
        )


class ReportServer:
    """The relay's side. Lifecycle: made once, `close`."""

    def __init__(self, root: Path, expect: Callable[[int, bytes], Transfer | None]) -> None:
        """`expect`: returns the transfer that reports are for, by version and digest of the plan; it may wait. None:
        reports are not wanted."""
        self._expect = expect
        self._path = root / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._socket = bind_path(self._path)
        self._socket.listen(BACKLOG)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="reports", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connected in [self._socket, *self._open]:
                hang_up(connected)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    connected, _ = self._socket.accept()
                except OSError:
                    if self._is_closed:
                        return
                    continue
                threading.Thread(target=self._serve, args=(connected,), name="report", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with connected, self._known(connected) as is_wanted:
            if is_wanted and is_same_user(connected):
                self._follow(connected)

    @contextlib.contextmanager
    def _known(self, connected: socket.socket) -> Iterator[bool]:
        """Let `close` end the connection within the block. False: the server is closed already."""
        with self._lock:
            self._open.add(connected)
            is_wanted = not self._is_closed
        try:
            yield is_wanted
        finally:
            with self._lock:
                self._open.discard(connected)

    def _follow(self, connected: socket.socket) -> None:
        try:
            version, rank, plan = HELLO.unpack(read_exactly(connected, HELLO.size))
        except OSError:
            return
        transfer = self._expect(version, plan)
        if transfer is None:
            return
        try:
            for chunks in _reports(connected):
                transfer.written(chunks)
        except TransferOver:
            return
        except OSError:
            transfer.rank_left(rank)


def _reports(connected: socket.socket) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the reports that have come, until the rank has finished. Raises `OSError` if the connection ends before."""
    data = b""
    while not data.startswith(FINISHED):
        some = connected.recv(READ_BYTES)
        if not some:
            raise ConnectionResetError("the rank has left.")
        data += some
        whole = len(data) - len(data) % REPORT.size
        if data[:whole].endswith(FINISHED):
            whole -= REPORT.size
        if whole:
            yield list(REPORT.iter_unpack(data[:whole]))
        data = data[whole:]
