"""The page's server in a thread of the test, at a port of its own."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from penstock.network.listener import listen
from penstock.ui.app import make_app

LOOK_S = 0.1
STARTED_WITHIN_S = 300


@contextlib.contextmanager
def served(place: Path) -> Iterator[str]:
    """The server's address, without a slash at the end."""
    bound = listen("127.0.0.1", [0])
    config = uvicorn.Config(make_app(place, look_s=LOOK_S), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not server.started:
            assert thread.is_alive(), "the server ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STARTED_WITHIN_S)
        bound.close()
