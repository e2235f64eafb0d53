"""The one place that knows whether the store is in this process or behind Ray. Used by `store/client.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from penstock.conf.errors import StoreError
from penstock.store.store import Store


class Link(Protocol):
    """Calls the store's methods by name, and moves batches."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int) -> tuple[pa.RecordBatch | None, list[Any]]:
        """The batch itself, to travel in the call, or a list with the one reference to it in shared memory."""

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]: ...


def link_to(handle: "Store | Any") -> Link:
    """`handle`: a `Store`, or a Ray actor handle of one."""
    return InProcess(handle) if isinstance(handle, Store) else OverRay(handle)


class InProcess:
    """Direct calls; all values inline."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._store, method)(*args)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int) -> tuple[pa.RecordBatch | None, list[Any]]:
        return batch, []

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return []


class OverRay:
    """Actor calls. A large batch is put into the object store under the store's ownership: it outlives who wrote it."""

    def __init__(self, handle: Any) -> None:
        import ray

        self._ray = ray
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self._handle, method).remote(*args)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise error.cause from None
            raise

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int) -> tuple[pa.RecordBatch | None, list[Any]]:
        if batch.nbytes <= inline_bytes:
            return batch, []
        return None, [self._ray.put(batch, _owner=self._handle)]

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return list(await asyncio.gather(*refs)) if refs else []
