"""Calls of played actors over a socket: `handle.method.remote(...)` here, `method(...)` of a member in another process.

Calls that are made in one turn of the event loop travel together, as do answers. So a call costs the caller little:
what Ray's calls cost beyond that is measured apart (`ray_calls.py`).
"""

import asyncio
import itertools
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from penstock.conf.errors import WorkerDied

HEADER = struct.Struct("<Q")
"""Layout of the size of the message that follows, in bytes: a pickled list."""


class Messages(asyncio.Protocol):
    """One end of a connection: whole messages come in, and go out gathered."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._leaving: list[Any] = []
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            found = pickle.loads(memoryview(self._received)[HEADER.size : end])
            del self._received[:end]
            for one in found:
                self.heard(one)

    def say(self, one: Any) -> None:
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._flush)
        self._leaving.append(one)

    def heard(self, one: Any) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        text = pickle.dumps(self._leaving, pickle.HIGHEST_PROTOCOL)
        self._leaving.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(HEADER.pack(len(text)) + text)


class Caller(Messages):
    """The end that has the handles. Lifecycle: `connect`; then `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        """Number of calls so far, by method."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @classmethod
    async def connect(cls, path: str) -> "Caller":
        _, caller = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return caller

    def call(self, name: str, method: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        self.counts[method] += 1
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.say((number, name, method, arguments))
        return answer

    def heard(self, one: Any) -> None:
        number, is_value, found = one
        answer = self._waiting.pop(number)
        if answer.done():  # nobody waits any more
            return
        if is_value:
            answer.set_result(found)
        else:
            answer.set_exception(found)

    def connection_lost(self, error: Exception | None) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerDied("the process of all members has ended"))
        self._waiting.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Answerer(Messages):
    """The end that has the members."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__()
        self._members = members
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, one: Any) -> None:
        number, name, method, arguments = one
        task = asyncio.ensure_future(self._answer(number, getattr(self._members[name], method), arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.say((number, True, await method(*arguments)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller hears it
            self.say((number, False, error))

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()


class Handle:
    """A handle of one member: `handle.method.remote(...)` is an awaitable, as with Ray."""

    def __init__(self, caller: Caller, name: str) -> None:
        self._caller, self._name = caller, name

    def __reduce__(self) -> tuple[Any, ...]:
        """Give members the name: they share their process."""
        return str, (self._name,)

    def __getattr__(self, method: str) -> "Method":
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self._caller, self._name, method)


class Method:
    def __init__(self, caller: Caller, name: str, method: str) -> None:
        self._caller, self._name, self._method = caller, name, method

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        return self._caller.call(self._name, self._method, arguments)
