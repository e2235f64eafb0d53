"""The store's client for code that does not await: trainer ranks."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease, SharedLease, Values
from penstock.store.errors import StoreError
from penstock.store.service.store import Store

T = TypeVar("T")


class SyncStoreClient:
    """The calls of `StoreClient`, each blocking its thread, which must have no running event loop.

    A thread of its own runs the client's event loop, so that leases are renewed while the caller computes. Around a
    `Store` in this process the store's loop is used, and the caller must be another thread.
    """

    def __init__(self, handle: "Store | Any") -> None:
        self._client = StoreClient(handle)
        first = handle[0] if isinstance(handle, list | tuple) else handle
        self._store = first if isinstance(first, Store) else None
        self._own: asyncio.AbstractEventLoop | None = None

    def lease(self, stage: str, max_units: int, owner: str) -> Lease | None:
        return self._run(self._client.lease(stage, max_units, owner))

    def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> SharedLease | None:
        return self._run(self._client.lease_shared(stage, round, rank, num_ranks, max_units, owner))

    def write(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> None:
        self._run(self._client.write(lease, row_ids, columns))

    def drop(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", reason: str, detail: str = "") -> None:
        self._run(self._client.drop(lease, row_ids, reason, detail))

    def release(self, lease: Lease) -> None:
        self._run(self._client.release(lease))

    def renew(self, lease: Lease) -> None:
        self._run(self._client.renew(lease))

    def complete_shared(self, lease: SharedLease) -> None:
        self._run(self._client.complete_shared(lease))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        loop = self._own_loop() if self._store is None else self._store.loop
        if loop is None or not loop.is_running():
            call.close()
            raise StoreError("this store serves no event loop yet: call it once from the loop that it is to live in.")
        return asyncio.run_coroutine_threadsafe(call, loop).result()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._own is None:
            self._own = asyncio.new_event_loop()
            running = threading.Event()
            self._own.call_soon(running.set)
            threading.Thread(target=self._own.run_forever, name="store-client", daemon=True).start()
            running.wait()
        return self._own
