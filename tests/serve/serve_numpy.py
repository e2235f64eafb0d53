"""A server on the backend in numpy, in a process of its own that may be killed: DIRECTORY PORT."""

import asyncio
import signal
import sys
from pathlib import Path

from penstock.conf.serve import ServeConfig
from penstock.serve.command import Server
from tests.serve.fake_backend import FakeBackend


async def main(directory, port):
    config = ServeConfig(port=int(port), snapshot_every=3)
    server = Server(config, FakeBackend(delay_s=0.02), Path(directory), "tml-any")
    print(await server.start(), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.serve_until(stop)


asyncio.run(main(*sys.argv[1:]))
