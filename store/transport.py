"""The one place that knows whether the store is in this process or behind Ray. Used by `store/client.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from penstock.conf.errors import StoreError
from penstock.store.store import Store


class Link(Protocol):
    """Calls the store's methods by name, and reads the batches that it refers to."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]: ...


def link_to(handle: "Store | Any") -> Link:
    """`handle`: a `Store`, or a Ray actor handle of one; a list of more than one is a partitioned store."""
    if isinstance(handle, list | tuple):
        from penstock.store.partitions import Partitioned  # late: it is made of links

        return link_to(handle[0]) if len(handle) == 1 else Partitioned([link_to(part) for part in handle])
    return InProcess(handle) if isinstance(handle, Store) else OverRay(handle)


class InProcess:
    """Direct calls; all values are in the answers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._store, method)(*args)

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return []


class OverRay:
    """Actor calls. Ray itself moves large arguments through shared memory; the store keeps a copy that it owns."""

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

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return list(await asyncio.gather(*refs)) if refs else []
