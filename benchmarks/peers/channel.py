"""A peer's end of a benchmark's channel: lines of JSON on what were standard input and output when it started.

    out  {"ready": true, ...}     once
    in   {...}                    a request
    out  {...}                    its answer
    in   (end of file)            stop

The other end is `Child` in `benchmarks/harness.py`. Peers run in environments of their own, so this imports nothing but
the standard library.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

Message = dict[str, Any]


class Channel:
    """The channel of a peer. Made before anything is imported that may write to standard output."""

    def __init__(self) -> None:
        # Nothing else may write to the channel: file descriptor 1 becomes standard error.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def send(self, message: Message) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def receive(self) -> Message | None:
        """Read the next request; None once there will be none."""
        for line in iter(sys.stdin.readline, ""):
            if line.strip():
                request: Message = json.loads(line)
                return request
        return None

    def requests(self) -> Iterator[Message]:
        return iter(self.receive, None)

    async def serve(self, answer: Callable[[Message], Awaitable[Message]]) -> None:
        """Answer one request after the other; the event loop is free while it waits for them."""
        while (request := await asyncio.to_thread(self.receive)) is not None:
            self.send(await answer(request))
