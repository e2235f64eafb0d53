"""The store's client for code that does not await: trainer ranks."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from penstock.conf.errors import PartnerGone, StoreError
from penstock.store.client.lease import Lease, SharedLease, Values
from penstock.store.client.links import HAS_LEFT
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec

T = TypeVar("T")


class SyncStoreClient:
    """The calls of `StoreClient` that ranks make, each blocking its thread, which must have no running event loop.

    A thread of its own runs the client's event loop, so that leases are renewed while the caller computes. Around a
    `Store` in this process the store's loop is used, and the caller must be another thread. `leave` ends the thread,
    and may be called beside a call that waits.
    """

    def __init__(self, handle: "Store | Any") -> None:
        self._client = StoreClient(handle)
        self._store = handle if isinstance(handle, Store) else None
        self._own: asyncio.AbstractEventLoop | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._has_left, self._leaving = False, threading.Lock()

    def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> SharedLease | None:
        return self._run(self._client.lease_shared(stage, round, rank, num_ranks, max_units, owner))

    def write(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> None:
        self._run(self._client.write(lease, row_ids, columns))

    def settle(self, stage: str) -> int:
        return self._run(self._client.settle(stage))

    def spec(self) -> StoreSpec:
        return self._run(self._client.spec())

    def leave(self) -> None:
        """Leave as `StoreClient.leave` does; calls that wait in other threads raise `PartnerGone`. A second time
        changes nothing, in another thread at the same time either."""
        with self._leaving:
            if self._has_left:
                return
            with suppress(StoreError):  # its loop has ended, and everything with it
                self._run(self._client.leave())
            self._has_left = True
            for call in list(self._under_way):
                call.cancel()
            if self._own is not None:
                self._own.call_soon_threadsafe(self._own.stop)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        loop = self._own_loop() if self._store is None else self._store.loop
        if loop is None or not loop.is_running():
            call.close()
            if self._has_left:
                raise PartnerGone(HAS_LEFT)
            raise StoreError("this store serves no event loop yet: call it once from the loop that it is to live in.")
        answer = asyncio.run_coroutine_threadsafe(call, loop)
        self._under_way.add(answer)
        if self._has_left:  # perhaps before it was noted
            answer.cancel()
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise PartnerGone(HAS_LEFT) from None
        finally:
            self._under_way.discard(answer)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._own is None:
            self._own = asyncio.new_event_loop()
            running = threading.Event()
            self._own.call_soon(running.set)
            threading.Thread(target=_run_until_stopped, args=(self._own,), name="store-client", daemon=True).start()
            running.wait()
        return self._own


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_cancel_all(loop))
    loop.close()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
