"""The store as a Ray actor: one light process, named, that everyone in the run finds."""

from typing import Any

import pyarrow as pa

from penstock.store.spec import StoreSpec
from penstock.store.store import Store

MAX_WAITING_CALLS = 10_000
"""Calls that may wait in the store at a time: each is a coroutine, not a thread."""


def create_store_actor(spec: StoreSpec, namespace: str, name: str = "Store") -> Any:
    """Start the store; returns its handle, for `StoreClient`. It lives as long as the handle's creator keeps it."""
    import ray

    options = {"name": name, "namespace": namespace, "num_cpus": 0, "max_concurrency": MAX_WAITING_CALLS}
    return ray.remote(Store).options(**options).remote(spec, keep=keep_in_object_store)


def keep_in_object_store(batch: pa.RecordBatch) -> Any:
    """Copy a batch into Ray's object store, owned by the calling process: the store. Runs in the actor only."""
    import ray

    return ray.put(batch)
