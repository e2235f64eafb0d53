"""The processes beside the controller's: the store's, and the one that all members share. Each says where it is called,
and ends with the process that has started it."""

import asyncio
import contextlib
import gc
import multiprocessing
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.controller.calls import Answerer
from benchmarks.controller.clock import run_fast
from benchmarks.controller.fleet import agents_of, plan_of
from benchmarks.controller.members import PlayedOwner, play
from benchmarks.controller.scale import Scale, flow_of
from penstock.orchestrator.cluster.owners import OWNER
from penstock.store.data.roots import PREFIX, SHARED_MEMORY
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_actor import GC_THRESHOLD
from penstock.store.service.store_server import Endpoint
from penstock.store.spec import StoreSpec

START_S = 120.0
"""Deadline for a process to serve, in seconds."""
END_S = 30.0


@contextlib.asynccontextmanager
async def served_store(scale: Scale, output_dir: str) -> AsyncIterator[Endpoint]:
    """Serve a store in this process."""
    config = scale.config(output_dir)
    spec = StoreSpec.of(flow_of(config), config)
    name = f"{PREFIX}store-{uuid.uuid4().hex}"
    segments = Segments(f"{SHARED_MEMORY}/{name}", f"{tempfile.gettempdir()}/{name}", spec.shared_bytes)
    store = Store(spec, segments=segments)
    try:
        yield await store.endpoint()
    finally:
        await store.end()


@contextlib.asynccontextmanager
async def served_members(scale: Scale, output_dir: str) -> AsyncIterator[str]:
    """Serve the members in this process. Yields the path of the socket where they are called."""
    config = scale.config(output_dir)
    flow = flow_of(config)
    plan, assignment = plan_of(config, flow, scale)
    members = {OWNER: PlayedOwner(), **play(plan, agents_of(assignment).values(), config, flow)}
    with tempfile.TemporaryDirectory(prefix="penstock-members-") as folder:
        path = str(Path(folder) / "socket")
        server = await asyncio.get_running_loop().create_unix_server(lambda: Answerer(members), path)
        try:
            yield path
        finally:
            server.close()


Serve = Callable[[Scale, str], contextlib.AbstractAsyncContextManager[Any]]


@contextlib.contextmanager
def process_of(serve: Serve, scale: Scale, output_dir: str, speed: float) -> Iterator[tuple[Any, int]]:
    """Serve in a new process, whose seconds pass so fast. Yields where, and the process's number."""
    here, there = multiprocessing.Pipe()
    spawning = multiprocessing.get_context("spawn")
    process = spawning.Process(target=_host, args=(serve, scale, output_dir, speed, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(START_S):
            raise SystemExit(f"{serve.__name__} did not serve within {START_S:g} s.")
        yield here.recv(), int(process.pid or 0)
    finally:
        here.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()


def _host(serve: Serve, scale: Scale, output_dir: str, speed: float, there: Connection) -> None:
    if serve is served_store:
        gc.set_threshold(*GC_THRESHOLD)  # as its actor does
    run_fast(_serving(serve, scale, output_dir, there), speed)


def _serving(serve: Serve, scale: Scale, output_dir: str, there: Connection) -> Callable[[], Coroutine[Any, Any, None]]:
    async def main() -> None:
        async with serve(scale, output_dir) as place:
            there.send(place)
            over = asyncio.Event()
            asyncio.get_running_loop().add_reader(there.fileno(), over.set)  # its other end is closed
            await over.wait()

    return main
