"""A store that is served over its socket, clients as in other processes of the machine, and the files they share."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.store.client.client import StoreClient
from penstock.store.client.links import Lazy, OverSocket
from penstock.store.data.roots import OWNER_NAME
from penstock.store.data.segments import Segments
from penstock.store.service.server import Endpoint
from penstock.store.service.store import Store
from tests.store.driver import make_spec


def serve(tmp_path: Path, body: Callable[[Store, Endpoint], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        spec = make_spec(**{"lease_timeout_s": 600.0, "inline_bytes": 2000, **changes})
        store = Store(spec, segments=Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), spec.shared_bytes))
        await asyncio.wait_for(body(store, await store.endpoint()), 20)
        store.ledger.check_invariants()
        await store.close("test over")

    asyncio.run(main())


async def visit(endpoint: Endpoint) -> tuple[StoreClient, OverSocket]:
    """A client as in another process of the machine."""
    client = StoreClient(endpoint)
    await client.spec()
    assert isinstance(client._link, Lazy)
    assert isinstance(client._link.found, OverSocket)
    return client, client._link.found


def files_in(place: Path) -> list[str]:
    return sorted(file.name for file in place.iterdir() if file.name not in (OWNER_NAME, "socket"))
