"""Connections between processes of a run: what is sent arrives, and other processes get nothing."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.network.connection import HELLO, Address, Connection, NotAuthenticated, connect, new_token
from penstock.network.listener import MAX_PENDING, Listener, PendingPeers

TOKEN = new_token()
ECHO, HAND_OVER = 1, 2
HOST = "127.0.0.1"
PATIENCE_S = 60.0
"""Deadline of what comes at once on a machine that is not busy."""


def echo(connected: socket.socket) -> None:
    with Connection(connected) as connection:
        try:
            while True:
                frame = connection.receive()
                values = bytearray(frame.num_bytes)
                connection.receive_into(memoryview(values))
                connection.send(frame.kind, frame.body, len(values))
                connection.send_bytes(values)
        except ConnectionError:
            return


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(HOST, TOKEN, {ECHO: echo}, handshake_s=PATIENCE_S) as listener:
        yield listener


def test_frames_and_the_bytes_of_a_file_arrive(listener: Listener, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "values").write_bytes(content)
    with connect(listener.address, ECHO, TOKEN, PATIENCE_S) as connection, (tmp_path / "values").open("rb") as file:
        receiving = bytearray(2_000_000)
        sender = threading.Thread(
            target=lambda: (
                connection.send(9, b"body", len(receiving)), connection.send_file(file, 500_000, len(receiving))
            )
        )  # fmt: skip
        sender.start()
        frame = connection.receive()
        connection.receive_into(memoryview(receiving))
        sender.join()
    assert (frame.kind, frame.body, frame.num_bytes) == (9, b"body", 2_000_000)
    assert bytes(receiving) == content[500_000:2_500_000]


def test_a_file_that_ends_too_soon_is_an_error(listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with connect(listener.address, ECHO, TOKEN, PATIENCE_S) as connection, (tmp_path / "short").open("rb") as file:
        connection.send(1, b"", 10)
        with pytest.raises(ConnectionAbortedError, match="short: 3 bytes"):
            connection.send_file(file, 0, 10)


def test_another_token_is_refused_and_counted(listener: Listener) -> None:
    with pytest.raises(ConnectionError):
        connect(listener.address, ECHO, new_token(), PATIENCE_S)
    with pytest.raises(ConnectionError):
        connect(listener.address, 99, TOKEN, PATIENCE_S).receive()  # a service that nobody serves
    assert listener.refused == 2


def test_a_stranger_gets_no_byte(listener: Listener) -> None:
    for words in (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n".ljust(HELLO.size, b"x"), os.urandom(HELLO.size)):
        with socket.create_connection((HOST, listener.address.port), PATIENCE_S) as visitor:
            visitor.sendall(words)
            with contextlib.suppress(ConnectionResetError):  # hung up on before it was done
                assert visitor.recv(1) == b""


def test_a_silent_connection_is_closed() -> None:
    with (
        Listener(HOST, TOKEN, {ECHO: echo}, handshake_s=0.1) as listener,
        socket.create_connection((HOST, listener.address.port), PATIENCE_S) as visitor,
    ):
        assert visitor.recv(1) == b""  # after handshake_s, not after all that the visitor would wait


def test_a_visitor_that_gets_no_thread_is_hung_up_on_and_the_next_is_let_in(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def start_but_the_first(thread: threading.Thread) -> None:
        if thread.name == "connection" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_the_first)
    with pytest.raises(ConnectionError):
        connect(listener.address, ECHO, TOKEN, PATIENCE_S)
    with connect(listener.address, ECHO, TOKEN, PATIENCE_S) as connection:
        connection.send(1, b"there")
        assert connection.receive().body == b"there"
    assert (refused, listener.refused) == (["connection"], 1)


@pytest.mark.parametrize("addresses", [1, 3])
def test_silent_connections_keep_no_member_out(addresses: int) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener(HOST, TOKEN, {ECHO: echo}, handshake_s=60.0))
        to = HOST, listener.address.port
        for number in range(MAX_PENDING + 20):
            own = f"127.0.0.{2 + number % addresses}", 0
            stack.enter_context(socket.create_connection(to, 30.0, source_address=own))
        for _ in range(3):
            with connect(listener.address, ECHO, TOKEN, 30.0) as connection:
                connection.send(1, b"there")
                assert connection.receive().body == b"there"
        give_up = time.monotonic() + PATIENCE_S
        while listener.refused < 20 and time.monotonic() < give_up:  # each is counted by a thread of its own
            time.sleep(0.01)
        assert listener.refused >= 20


def test_the_oldest_stranger_of_the_address_with_most_leaves() -> None:
    pending = PendingPeers[str](3)
    assert [pending.add(who, who[0]) for who in ("a1", "b1", "b2")] == [None, None, None]
    assert pending.add("c1", "c") == "b1"
    assert pending.add("c2", "c") == "a1"  # one each: the oldest of all
    pending.gone("b2")
    pending.gone("b1")  # has left before
    assert pending.add("a2", "a") is None
    assert pending.add("a3", "a") == "c1"


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_the_oldest_stranger_of_the_host_with_most_has_to_leave(most: int, moves: list[tuple[int, bool]]) -> None:
    pending, there = PendingPeers[int](most), list[tuple[int, int]]()
    for number, (host, goes) in enumerate(moves):
        if goes and there:
            gone = there.pop(host % len(there))
            pending.gone(gone[0])
            continue
        left = pending.add(number, str(host))
        assert (left is None) == (len(there) < most)
        if left is not None:
            count = Counter(one for _, one in there)
            largest = max(count.values())
            assert left == next(who for who, one in there if count[one] == largest)
            there = [entry for entry in there if entry[0] != left]
        there.append((number, host))


def test_a_server_of_another_run_is_found_out() -> None:
    """The server answers the hello with a token of its own."""
    with socket.create_server((HOST, 0)) as impostor:

        def answer() -> None:
            connected, _ = impostor.accept()
            with connected:
                connected.recv(HELLO.size, socket.MSG_WAITALL)
                connected.sendall(bytes(64))
                connected.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NotAuthenticated, match="another run"):
            connect(Address(HOST, impostor.getsockname()[1]), ECHO, TOKEN, PATIENCE_S)
        thread.join()


def test_close_ends_open_connections(listener: Listener) -> None:
    connection = connect(listener.address, ECHO, TOKEN, PATIENCE_S)
    connection.send(1, b"there")
    assert connection.receive().body == b"there"
    listener.close()
    with pytest.raises(ConnectionError):
        connection.receive()
    with pytest.raises(OSError):  # noqa: PT011 - refused, or reset: it depends on the moment
        connect(listener.address, ECHO, TOKEN, 1.0)


def test_what_a_handler_takes_with_it_stays_open_after_close() -> None:
    taken: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    returning = threading.Event()

    def take(connected: socket.socket) -> None:
        taken.put(connected)
        returning.wait(10)  # the thread that has handed it over may be the last to hear of that

    with Listener(HOST, TOKEN, {ECHO: echo, HAND_OVER: take}, takers=(HAND_OVER,)) as listener:
        connection = connect(listener.address, HAND_OVER, TOKEN, PATIENCE_S)
        server = Connection(taken.get(timeout=900))
        closing = threading.Thread(target=listener.close)
        closing.start()
        closing.join(10)
        returning.set()
    with connection, server:
        server.send(7, b"still there")
        assert connection.receive().body == b"still there"


def test_silence_is_an_error(listener: Listener) -> None:
    with connect(listener.address, ECHO, TOKEN, PATIENCE_S, silence_s=0.2) as connection, pytest.raises(TimeoutError):
        connection.receive()


def test_the_first_free_port_of_a_range_is_taken(listener: Listener) -> None:
    taken = listener.address.port
    with pytest.raises(OSError, match="in use"):
        Listener(HOST, TOKEN, {}, ports=range(taken, taken + 1))
    for last in range(taken + 2, taken + 50):  # some port above is free
        try:
            with Listener(HOST, TOKEN, {}, ports=range(taken, last)) as second:
                assert second.address.port != taken
                return
        except OSError:
            continue
    raise AssertionError("no port was free")
