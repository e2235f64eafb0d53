"""The store as a Ray actor: a light, named process that every process of the run finds."""

import contextlib
import gc
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from penstock.metering.ray_export import Origin, exported
from penstock.network.connection import new_token
from penstock.network.host import raise_limit
from penstock.store.data.remote_rows import RowsNodes
from penstock.store.data.roots import PREFIX, SHARED_MEMORY, guard_root, identity, sweep_stale
from penstock.store.data.segments import Segments
from penstock.store.service import store
from penstock.store.service.store_server import Endpoint, StorePort
from penstock.store.spec import StoreSpec

STORE = "Store"
"""The actor's name, as in the dashboard."""
GC_THRESHOLD = (10_000, 2, 10**9)
"""Thresholds of Python's collector. It looks for cycles, of which the store makes few, and stops all calls meanwhile:
10,000 objects take some 5 ms, the state of 10^6 rows would take 300. So it examines young objects, some at a time, and
never those that it has examined twice: few of them are in cycles, such as a connection that has ended.
"""


class Store:
    """The store with its segments, on the machine that Ray puts it on. The dashboard shows the class's name.

    Ray says where it is called, and checks the caller: an actor call needs Ray's own authentication, and brings the
    token that the store's port asks for. All other calls go there.
    """

    def __init__(
        self,
        spec: StoreSpec,
        directory: str,
        restore: str | None,
        ports: list[int] | None,
        nodes: RowsNodes | None,
        origin: Origin | None,
    ) -> None:
        import ray

        gc.set_threshold(*GC_THRESHOLD)
        raise_limit()
        spill = os.path.join(_disk(spec.spill_dir), f"{PREFIX}store-{uuid.uuid4().hex}")
        span = range(ports[0], ports[1] + 1) if ports is not None else range(1)
        token = nodes.token if nodes is not None else new_token()
        port = StorePort(ray.util.get_node_ip_address(), token, span)  # type: ignore[no-untyped-call]
        segments = Segments(directory, spill, spec.shared_bytes, nodes)
        for place in (directory, spill):
            guard_root(place)
        node = ray.get_runtime_context().get_node_id()
        self._store = store.Store(
            spec, segments=segments, node=node, restore=restore, port=port, meters=exported(origin)
        )

    async def endpoint(self) -> Endpoint:
        """Return the address at which the store is called."""
        return await self._store.endpoint()

    async def process(self, _stacks: str) -> tuple[int, tuple[str, ...]]:
        """Return this process's number, and what tells it from another that has the number later."""
        return os.getpid(), identity(os.getpid())

    async def progress(self) -> None:
        """Answer, as long as the store serves."""

    async def end(self) -> None:
        """Remove what the store keeps in files: no client calls any more."""
        await self._store.end()


def create_store_actor(
    spec: StoreSpec,
    namespace: str,
    name: str = STORE,
    restore: str | None = None,
    directory: str | None = None,
    ports: list[int] | None = None,
    nodes: RowsNodes | None = None,
    options: Mapping[str, Any] | None = None,
    make: Callable[..., Any] | None = None,
    origin: Origin | None = None,
) -> Any:
    """Start one store; returns its handle, for `StoreClient`. It lives as long as the handle's creator keeps it, or
    until `end_store_actor`.

    `restore`: a snapshot to resume from, see `snapshot.py`. `directory`: which it makes for its socket and segments;
    None: one in shared memory. `ports`: first and last that it may listen on for other machines; None: any. `nodes`: of
    a run on several, with the token that all of them ask for, the store too. `options`: more for Ray, such as its node.
    `make`: makes the actor of its class, options and arguments; None: this process does. `origin`: of what it measures;
    None: that goes nowhere.
    """
    if directory is None:
        directory = os.path.join(SHARED_MEMORY, f"{PREFIX}store-{uuid.uuid4().hex}")
    options = {"name": name, "namespace": namespace, "num_cpus": 0, **(options or {})}
    return (make or _make)(Store, options, spec, directory, restore, ports, nodes, origin)


def _make(cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
    import ray

    return ray.remote(cls).options(**options).remote(*arguments)


def end_store_actor(
    handle: Any, spill_dir: str | None = None, timeout_s: float = 10.0, kill: Callable[[Any], None] | None = None
) -> None:
    """Have a store remove its files, and kill it. The files of a store that is dead already, or does not answer, are
    swept, by this call or by the next store beside it: `spill_dir` is its spec's. `kill`: None is Ray's own. Never
    raises for a dead one."""
    import ray

    kill = kill or ray.kill
    try:
        ray.get(handle.end.remote(), timeout=timeout_s)
        kill(handle)
    except ray.exceptions.RayError:
        with contextlib.suppress(ray.exceptions.RayError):
            kill(handle)
        for parent in (SHARED_MEMORY, _disk(spill_dir)):
            sweep_stale(parent)


def _disk(spill_dir: str | None) -> str:
    """The directory that batches are moved below, on the caller's machine."""
    return spill_dir or tempfile.gettempdir()
