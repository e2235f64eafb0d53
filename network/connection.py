"""Connections between two processes of a run: authentication, frames, and files' bytes.

On different machines both ends first prove that they know the run's token:

    client ─ hello:  magic, service, nonce, proof of these ─▶ server      others get no answer at all
    client ◀─ reply:  nonce, proof of both nonces ──────────── server      so the server is of the run, too
    client ─ finish: proof of both nonces ─────────────────▶ server      and the hello was no repeated one

Proofs are HMAC-SHA256 (RFC 2104), each over other words, compared in constant time. Every message has a fixed length.
The token never travels. What follows is neither encrypted nor signed: it keeps other processes out, not an attacker
that can change packets on the way; `docs/cluster.md` says what to do about those.

Then they exchange frames with a fixed header, and files' bytes:

    kind │ bytes of the body │ bytes that follow it │ body │ bytes …

The body is small plain data (`msgspec`), which the user of the connection encodes; the bytes that follow it are a
file's, sent by the kernel (`sendfile`), or an array's. Blocking, for threads: every call ends within the connection's
silence.

On one machine: a Unix socket at a path, whose ends run as the same user.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

MAGIC = b"PENSTOCK1"
"""The protocol and its version."""
NONCE_BYTES = PROOF_BYTES = TOKEN_BYTES = 32
HELLO = struct.Struct(f"!{len(MAGIC)}sB{NONCE_BYTES}s{PROOF_BYTES}s")
REPLY = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
FINISH_BYTES = PROOF_BYTES
HEADER = struct.Struct("!BIQ")
MAX_BODY = 2**28
"""The largest size of a body, in bytes. A longer one is no message of ours."""
SILENCE_S = 30.0
"""Seconds after which a connection on which nothing could be sent or received is lost. A cable that was pulled for a
few seconds is not noticed."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 5))
"""Keepalive options, in seconds, seconds, probes: an idle connection to a machine that is gone ends after
`SILENCE_S`."""
CREDENTIALS = struct.Struct("iII")
"""Layout of `SO_PEERCRED`: PID, user, group (unix(7))."""


class NotAuthenticated(ConnectionError):
    """The other end does not know the run's token, or speaks something else."""


def new_token() -> bytes:
    """Make the token of a run. It reaches the run's processes through Ray, and is neither written nor logged."""
    return secrets.token_bytes(TOKEN_BYTES)


class ClientHandshake:
    """The client's side. Lifecycle: send `hello`, then `finish(reply)`."""

    def __init__(self, token: bytes, service: int) -> None:
        self._token, self._service = token, service
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def hello(self) -> bytes:
        return HELLO.pack(MAGIC, self._service, self._nonce, _proof(self._token, b"hello", self._service, self._nonce))

    def finish(self, reply: bytes) -> bytes:
        """Return the last message. Raises `NotAuthenticated` unless the server knows the token."""
        nonce, proof = REPLY.unpack(reply)
        nonces = self._nonce + nonce
        if not hmac.compare_digest(proof, _proof(self._token, b"reply", self._service, nonces)):
            raise NotAuthenticated("the process that answers does not know this run's token: it is of another run.")
        return _proof(self._token, b"finish", self._service, nonces)


class ServerHandshake:
    """The server's side. Lifecycle: `reply(hello)`, then `finish(proof)`, then `service` may be served."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonces = b""
        self.service = 0
        """The service that the client asks for."""

    def reply(self, hello: bytes) -> bytes:
        """Return the answer to `hello`. Raises `NotAuthenticated`: then nothing is to be answered."""
        magic, self.service, nonce, proof = HELLO.unpack(hello)
        if magic != MAGIC or not hmac.compare_digest(proof, _proof(self._token, b"hello", self.service, nonce)):
            raise NotAuthenticated("a connection that does not begin with this run's token.")
        own = secrets.token_bytes(NONCE_BYTES)
        self._nonces = nonce + own
        return REPLY.pack(own, _proof(self._token, b"reply", self.service, self._nonces))

    def finish(self, proof: bytes) -> None:
        """Check the last message. Raises `NotAuthenticated`."""
        if not hmac.compare_digest(proof, _proof(self._token, b"finish", self.service, self._nonces)):
            raise NotAuthenticated("a connection that repeats what another has said.")


def _proof(token: bytes, word: bytes, service: int, nonces: bytes) -> bytes:
    return hmac.digest(token, b"|".join((MAGIC, word, bytes((service,)), nonces)), "sha256")


@dataclass(frozen=True)
class Address:
    """The address on which a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Frame:
    """The head of a message. `num_bytes` follow on the connection, and are to be received next."""

    kind: int
    body: bytes
    num_bytes: int = 0


class Connection:
    """One end of a connection. Not thread-safe: one thread sends, one receives.

    Raises `ConnectionError` when the other end is gone, `TimeoutError` when it is silent.
    """

    def __init__(self, connected: socket.socket, silence_s: float = SILENCE_S) -> None:
        """Wrap the socket `connected`, whose handshake is done."""
        self.socket = connected
        prepare(connected, silence_s)

    def send(self, kind: int, body: bytes = b"", num_bytes: int = 0) -> None:
        """Send a frame. The caller sends `num_bytes` next, by `send_file` or `send_bytes`."""
        more = socket.MSG_MORE if num_bytes else 0
        view = memoryview(HEADER.pack(kind, len(body), num_bytes) + body)
        while len(view):
            view = view[self.socket.send(view, more) :]

    def send_bytes(self, values: "bytes | bytearray | memoryview") -> None:
        self.socket.sendall(values)

    def send_file(self, file: BinaryIO, offset: int, num_bytes: int) -> None:
        """Send by the kernel, without a copy in this process. Raises `ConnectionError` if the file ends before."""
        sent = self.socket.sendfile(file, offset, num_bytes) if num_bytes else 0
        if sent != num_bytes:
            raise ConnectionAbortedError(f"{file.name}: {sent} bytes from {offset} instead of {num_bytes}.")

    def receive(self) -> Frame:
        kind, length, num_bytes = HEADER.unpack(read_exactly(self.socket, HEADER.size))
        if length > MAX_BODY:
            raise ConnectionAbortedError(f"a message of {length} bytes: the other end speaks something else.")
        return Frame(kind, read_exactly(self.socket, length), num_bytes)

    def receive_into(self, target: memoryview) -> None:
        """Receive as many bytes as there is room for."""
        _fill(self.socket, target)

    def hang_up(self) -> None:
        """End the connection from any thread: threads that send or receive at either end get an error. It still has to
        be closed."""
        hang_up(self.socket)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: Address, service: int, token: bytes, timeout_s: float, silence_s: float = SILENCE_S) -> Connection:
    """Return an authenticated connection. Raises `TimeoutError`, `NotAuthenticated`, or another `OSError`, each within
    about `timeout_s`."""
    connected = socket.create_connection((address.host, address.port), timeout_s)
    try:
        greet(connected, service, token)
        return Connection(connected, silence_s)
    except BaseException:
        connected.close()
        raise


def greet(connected: socket.socket, service: int, token: bytes) -> None:
    """Perform the client's side of the handshake, within the socket's timeout for each message."""
    handshake = ClientHandshake(token, service)
    connected.sendall(handshake.hello)
    connected.sendall(handshake.finish(read_exactly(connected, REPLY.size)))


def read_exactly(connected: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises `ConnectionResetError` if the connection ends before."""
    data = bytearray(count)
    _fill(connected, memoryview(data))
    return bytes(data)


def _fill(connected: socket.socket, target: memoryview) -> None:
    while len(target):
        count = connected.recv_into(target)
        if not count:
            raise ConnectionResetError("the other end has closed the connection: is it of the same run?")
        target = target[count:]


def prepare(connected: socket.socket, silence_s: float = SILENCE_S) -> None:
    """Have the kernel notice a machine that is gone, also where neither end says anything."""
    connected.settimeout(silence_s)
    if connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
        for option, value in KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def hang_up(connected: socket.socket) -> None:
    """Shut the socket down for the thread that uses it, which closes it: a descriptor that another thread closes may
    belong to another file by then."""
    with contextlib.suppress(OSError):  # it has ended already
        connected.shutdown(socket.SHUT_RDWR)


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user. The kernel says so, not the peer. The
    standard library has no call for it, and `multiprocessing.connection` wants a secret that the caller would have to
    hand over."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(said)[1]) == os.geteuid()


def bind_path(path: Path) -> socket.socket:
    """Make a socket at `path`, to listen on. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listener.bind(name)
    return listener


def connect_path(path: Path) -> socket.socket:
    """Connect to the socket at `path`, which a process of this user serves. Raises `OSError`: `PermissionError` if it
    is another's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # at once, or not at all
    try:
        with _short(path) as name:
            connection.connect(name)
        if not is_same_user(connection):
            raise PermissionError(f"{path} is served by another user")
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that the kernel takes, however long its directory's is: it has 108 bytes for it."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
