"""Messages as bytes on a connection, and what a `Wire` makes of bytes that come in pieces."""

from typing import Any

from penstock.store.service.wire import OnMessage, Wire


class Recorder:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.aborted = False

    def write(self, data: Any) -> None:
        self.data += data

    def abort(self) -> None:
        self.aborted = True


def frame(message: Any, kind: int = 0) -> bytes:
    """A message as it is sent."""
    recorder = Recorder()
    sender = Wire(lambda *_: None, lambda _: None)
    sender.connection_made(recorder)  # type: ignore[arg-type]
    sender.send(kind, message)
    return bytes(recorder.data)


def read(data: bytes, chunk: int, on_message: OnMessage) -> Recorder:
    """Read in pieces of at most `chunk` bytes, as asyncio does. Return the transport, which may have been aborted."""
    recorder, left = Recorder(), memoryview(data)
    receiver = Wire(on_message, lambda _: None)
    receiver.connection_made(recorder)  # type: ignore[arg-type]
    while len(left) and not recorder.aborted:
        room = receiver.get_buffer(-1)
        assert len(room), "asyncio ends a connection that has no room for what has come"
        count = min(len(room), chunk, len(left))
        room[:count] = left[:count]
        left = left[count:]
        receiver.buffer_updated(count)
    return recorder
