"""The store as a Ray actor: one light process, named, that everyone in the run finds."""

from typing import Any

import pyarrow as pa

from penstock.store.partitions import split_spec
from penstock.store.spec import StoreSpec
from penstock.store.store import Store

MAX_WAITING_CALLS = 10_000
"""Calls that may wait in the store at a time: each is a coroutine, not a thread."""


def create_store_actor(spec: StoreSpec, namespace: str, name: str = "Store", restore: str | None = None) -> Any:
    """Start one store; returns its handle, for `StoreClient`. It lives as long as the handle's creator keeps it.

    `restore`: a snapshot to go on from, see `store/snapshot.py`.
    """
    import ray

    options = {"name": name, "namespace": namespace, "num_cpus": 0, "max_concurrency": MAX_WAITING_CALLS}
    return (
        ray.remote(Store).options(**options).remote(spec, keep=keep_in_object_store, fetch=read_object, restore=restore)
    )


def create_store_actors(spec: StoreSpec, namespace: str, num_partitions: int = 1) -> list[Any]:
    """The store of a run, in one part or several: `Store`, or `Store-0`, `Store-1`, … Raises `StoreError`."""
    part = split_spec(spec, num_partitions)
    return [create_store_actor(part, namespace, name) for name in store_names(num_partitions)]


def store_names(num_partitions: int) -> list[str]:
    """Of the store's actors, as in the dashboard."""
    return ["Store"] if num_partitions == 1 else [f"Store-{index}" for index in range(num_partitions)]


def keep_in_object_store(batch: pa.RecordBatch) -> Any:
    """Copy a batch into Ray's object store, owned by the calling process: the store. Runs in the actor only."""
    import ray

    return ray.put(batch)


def read_object(ref: Any) -> pa.RecordBatch:
    """What `keep_in_object_store` kept, without a copy where it lies on this node."""
    import ray

    return ray.get(ref)
