"""How fast bytes go from this node to another: over as many connections as a relay's lanes, a bounded amount, once.

measure ─ connections ─▶ frames, until MOST_BYTES or MOST_S ─▶ END ─▶ serve, which has received all ─▶ END
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from penstock.network.connection import Address, Connection, connect

LINKS = 5
"""Service of an agent's port, a byte."""
BYTES, END = 0, 1
"""Kinds of frames."""
LANES = 4
"""Connections: relays open one for each `LANE_BYTES` of a version (`weights/chain/plan.py`), up to a few."""
MOST_BYTES, MOST_S = 2**24, 0.5
"""Bytes of a lane, and seconds in which they are sent: whichever ends first. 64 MiB in all."""
FRAME_BYTES = 2**20
DEADLINE_S = 5.0
"""Seconds for a connection, and for each frame: a link that is slower than a frame in so long is none."""


def serve(connected: socket.socket) -> None:
    """Receive what another agent sends, until it ends."""
    room = memoryview(bytearray(FRAME_BYTES))
    with Connection(connected, DEADLINE_S) as connection:
        try:
            while (frame := connection.receive()).kind == BYTES and frame.num_bytes <= FRAME_BYTES:
                connection.receive_into(room[: frame.num_bytes])
            connection.send(END)
        except OSError:
            return


def measure(address: Address, token: bytes) -> float:
    """Bytes a second to the node whose agent listens there. Raises `OSError`."""
    with ExitStack() as open_ones, ThreadPoolExecutor(LANES) as threads:
        lanes = [open_ones.enter_context(connect(address, LINKS, token, DEADLINE_S, DEADLINE_S)) for _ in range(LANES)]
        began = time.perf_counter()
        sent = sum(threads.map(send, lanes))
        return sent / (time.perf_counter() - began)


def send(connection: Connection) -> int:
    """Send until there is enough; return how many bytes have arrived."""
    frame, sent, end = bytes(FRAME_BYTES), 0, time.perf_counter() + MOST_S
    while sent < MOST_BYTES and time.perf_counter() < end:
        connection.send(BYTES, num_bytes=len(frame))
        connection.send_bytes(frame)
        sent += len(frame)
    connection.send(END)
    connection.receive()
    return sent
