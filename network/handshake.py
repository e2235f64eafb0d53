"""Mutual authentication: both ends prove that they know the run's token, before anything else is read.

    client ─ hello:  magic, service, nonce, proof of these ─▶ server      others get no answer at all
    client ◀─ reply:  nonce, proof of both nonces ──────────── server      so the server is of the run, too
    client ─ finish: proof of both nonces ─────────────────▶ server      and the hello was no repeated one

Proofs are HMAC-SHA256 (RFC 2104), each over other words, compared in constant time. Every message has a fixed length.
The token never travels. What follows is neither encrypted nor signed: it keeps other processes out, not an attacker
that can change packets on the way; `docs/cluster.md` says what to do about those.

Pure: bytes in, bytes out. `listener.py` and `connection.py` send them.
"""

import hmac
import secrets
import struct

MAGIC = b"PENSTOCK1"
"""The protocol and its version."""
NONCE_BYTES = PROOF_BYTES = TOKEN_BYTES = 32
HELLO = struct.Struct(f"!{len(MAGIC)}sB{NONCE_BYTES}s{PROOF_BYTES}s")
REPLY = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
FINISH_BYTES = PROOF_BYTES


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
