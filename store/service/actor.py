"""The store as a Ray actor: a light process, named, that everyone in the run finds."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from penstock.store.data.roots import PREFIX, SHARED_MEMORY, sweep_stale
from penstock.store.data.segments import Segments
from penstock.store.service import store
from penstock.store.service.calls import with_values
from penstock.store.spec import StoreSpec

MAX_WAITING_CALLS = 10_000
"""Calls that may wait in the store at a time: each is a coroutine, not a thread."""
STORE = "Store"
"""The actor's name, as in the dashboard."""
CALLS = (
    "spec", "endpoint", "many", "put", "withdraw_put", "lease", "withdraw", "lease_shared", "batch_ready",
    "complete_shared",
    "write", "drop", "release", "renew", "abandon", "published", "last_batch", "cut", "snapshot", "stats",
    "describe", "close", "end",
)  # fmt: skip
"""What clients on other machines call through Ray."""
GC_THRESHOLD = (50_000, 20, 50)
"""Python's collector looks for cycles, of which the store makes few; at its usual pace it would walk over all resident
rows' state many times a second."""


class Store:
    """The store with its segments, on the machine that Ray puts it on. The dashboard shows the class's name.

    Its methods are `CALLS`, each handed on, with values in place of segments: a client that calls through Ray may be on
    another machine, and may be gone before it has read them. Ray wraps every method of an actor's class, and calls
    that come by the store's own socket need not pay for that.
    """

    def __init__(self, spec: StoreSpec, directory: str, restore: str | None = None) -> None:
        import ray

        gc.set_threshold(*GC_THRESHOLD)
        spill = os.path.join(_disk(spec.spill_dir), f"{PREFIX}store-{uuid.uuid4().hex}")
        self._segments = Segments(directory, spill, spec.shared_bytes)
        node = ray.get_runtime_context().get_node_id()
        self._store = store.Store(spec, segments=self._segments, node=node, restore=restore)


def _handed_on(name: str) -> Callable[..., Any]:
    async def call(self: Store, *arguments: Any) -> Any:
        return with_values(await getattr(self._store, name)(*arguments), self._segments.open)

    call.__name__ = name
    return call


for _name in CALLS:
    setattr(Store, _name, _handed_on(_name))


def create_store_actor(
    spec: StoreSpec,
    namespace: str,
    name: str = STORE,
    restore: str | None = None,
    directory: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Start one store; returns its handle, for `StoreClient`. It lives as long as the handle's creator keeps it, or
    until `end_store_actor`.

    `restore`: a snapshot to go on from, see `snapshot.py`. `directory`: which it makes for its socket and
    segments; None: one in shared memory, which goes with this process if nobody ends the store. `options`: more for
    Ray, such as its node.
    """
    import ray

    if directory is None:
        directory = os.path.join(SHARED_MEMORY, f"{PREFIX}store-{uuid.uuid4().hex}")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    own = {"name": name, "namespace": namespace, "num_cpus": 0, "max_concurrency": MAX_WAITING_CALLS}
    return ray.remote(Store).options(**own, **(options or {})).remote(spec, directory, restore)


def end_store_actor(handle: Any, spill_dir: str | None = None, timeout_s: float = 10.0) -> None:
    """Have a store remove its files, and kill it. What one leaves that is dead already, or does not answer, is swept,
    by this call or by the next store beside it: `spill_dir` is its spec's. Never raises for a dead one."""
    import ray

    try:
        ray.get(handle.end.remote(), timeout=timeout_s)
        ray.kill(handle)
    except ray.exceptions.RayError:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(handle)
        for parent in (SHARED_MEMORY, _disk(spill_dir)):
            sweep_stale(parent)


def _disk(spill_dir: str | None) -> str:
    """What batches are moved below, on the machine of who asks."""
    return spill_dir or tempfile.gettempdir()
