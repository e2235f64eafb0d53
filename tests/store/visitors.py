"""A store that is served to other processes, clients as in those, local and remote, and the files they share."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.network.connection import new_token
from penstock.network.listener import Listener
from penstock.store.client.links import InProcessLink, LazyLink, Link, SocketLink, TcpLink
from penstock.store.client.store_client import StoreClient
from penstock.store.data.remote_rows import ROWS, RowsNode, RowsNodes, RowsServer
from penstock.store.data.roots import OWNER_NAME
from penstock.store.data.segment_files import SPARE
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint, StorePort
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants

WAYS = {"in process": InProcessLink, "socket": SocketLink, "tcp": TcpLink}
"""Ways from a client to its store."""


class RemoteNode:
    """A node of its own for large batches: directories, and a server of what lies there."""

    def __init__(self, name: str, tmp_path: Path, token: bytes) -> None:
        self.shm, self.disk = tmp_path / name / "shm", tmp_path / name / "penstock-disk"
        self.shm.mkdir(parents=True)
        places = str(self.shm), str(self.disk)
        self.server = RowsServer(places, takes_orders=True)
        self.listener = Listener("127.0.0.1", token, {ROWS: self.server.serve})
        self.facts = RowsNode(name, places, self.listener.address)

    def close(self) -> None:
        self.listener.close()
        self.server.close()


def remote_nodes(tmp_path: Path, names: str) -> tuple[dict[str, RemoteNode], RowsNodes]:
    token = new_token()
    remote = {name: RemoteNode(name, tmp_path, token) for name in names}
    return remote, RowsNodes({name: one.facts for name, one in remote.items()}, token)


def serve(
    tmp_path: Path,
    body: Callable[[Store, Endpoint], Awaitable[None]],
    *,
    node: str = "",
    nodes: RowsNodes | None = None,
    restore: str | None = None,
    **changes: Any,
) -> None:
    async def main() -> None:
        spec = make_spec(**{"lease_timeout_s": 600.0, "inline_bytes": 2000, **changes})
        segments = Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), spec.shared_bytes, nodes)
        port = StorePort("127.0.0.1", nodes.token if nodes is not None else new_token())
        store = Store(spec, segments=segments, node=node, restore=restore, port=port)
        await asyncio.wait_for(body(store, await store.endpoint()), 20)
        check_invariants(store.ledger)
        await store.end()

    asyncio.run(main())


async def visit(endpoint: Endpoint) -> tuple[StoreClient, SocketLink]:
    """A client as in another process of the machine."""
    client = StoreClient(endpoint)
    link = await linked(client)
    assert isinstance(link, SocketLink)
    return client, link


async def visit_remotely(endpoint: Endpoint) -> tuple[StoreClient, TcpLink]:
    """A client as on another machine."""
    client = StoreClient(unseen(endpoint))
    link = await linked(client)
    assert isinstance(link, TcpLink)
    return client, link


async def visit_by(way: str, store: Store, endpoint: Endpoint) -> tuple[StoreClient, Link]:
    client = StoreClient({"in process": store, "socket": endpoint, "tcp": unseen(endpoint)}[way])
    link = await linked(client)
    assert isinstance(link, WAYS[way])
    return client, link


async def linked(client: StoreClient) -> Link:
    await client.spec()
    link = client.link
    if not isinstance(link, LazyLink):
        return link
    assert link.found is not None
    return link.found


async def until(holds: Callable[[], bool], pause_s: float = 0.005) -> None:
    """Wait, without a call to the store, for what comes unannounced. `serve` has a deadline. `pause_s`: 0 to look in
    every turn of the loop."""
    while not holds():
        await asyncio.sleep(pause_s)


def unseen(endpoint: Endpoint) -> Endpoint:
    """The endpoint as a machine or a container sees it that has other directories."""
    return replace(endpoint, path="/not/here", segments=("/not", "/here"))


def files_in(place: Path) -> list[str]:
    """Those of writers."""
    names = (file.name for file in place.iterdir() if file.name not in (OWNER_NAME, "socket"))
    return sorted(name for name in names if not name.startswith(SPARE))
