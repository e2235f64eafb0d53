"""Watches the agents of a run's nodes. A node that the run depends on may not end before it. A node that it can do
without may leave: its members are gone with it, what it had of rows is made again, and others take their place where
there is room.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.conf.errors import PartnerGone
from penstock.orchestrator.cluster.failures import first_line, held_back
from penstock.orchestrator.cluster.ray_calls import translate
from penstock.orchestrator.membership.restarts import Restarts
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.store_recovery import StoreRecovery


class Nodes:
    """Lifecycle: `look` at the start; from then on it is called for new nodes."""

    def __init__(
        self,
        context: RunContext,
        restarts: Restarts,
        stores: StoreRecovery,
        start: Callable[[Awaitable[None]], None],
        lose: Callable[[list[str]], list[str]],
        make_up_for: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        """`start`: runs a task until the serving ends. `lose`: notes that members are gone, and returns those that do
        not start again, which `make_up_for` is then called with."""
        self._fleet, self._store, self._directory = context.fleet, context.store, context.directory
        self._restarts, self._stores = restarts, stores
        self._start, self._lose, self._make_up_for = start, lose, make_up_for
        self._watched: set[str] = set()

    def look(self) -> None:
        """Watch the nodes that are there and are not watched yet."""
        self._fleet.capacity.on_node = self.look
        for node, name, handle in self._fleet.capacity.nodes:
            if node not in self._watched:
                self._watched.add(node)
                self._start(held_back(self._watch(node, name, handle)))

    async def _watch(self, node: str, name: str, handle: Any) -> None:
        capacity, failure = self._fleet.capacity, await _ended(name, handle)
        if not capacity.can_lose(node):
            self._restarts.beyond_help("agent", name, failure)
            raise failure from None
        self._directory.event("node_left", node=name.removeprefix("Agent-"), message=first_line(failure))
        names = capacity.names_on(node)
        leaving = self._lose(names)
        await self._stores.with_store(lambda: self._store.lost(node))
        capacity.forget_node(node)  # from here on the others may start again, elsewhere or there
        self._watched.discard(node)
        await self._make_up_for(leaving)


async def _ended(name: str, handle: Any) -> Exception:
    """The failure of an agent that ends: it is to end with its run and not before."""
    try:
        await handle.run.remote()
    except Exception as error:  # noqa: BLE001 - every way in which an actor can fail has a named error
        return translate(error, name)
    return PartnerGone(f"{name} has ended before the run was over.")
