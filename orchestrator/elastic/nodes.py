"""Watches the agents of a run's nodes. What the run stands on may not end before it; a node that is there for members
that joined may: they are gone with it. Used by `members.py`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.conf.errors import PartnerGone
from penstock.orchestrator.failures import first_line, held_back
from penstock.orchestrator.faults.supervisor import Supervisor
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.ray_calls import translate
from penstock.orchestrator.recording.run_directory import RunDirectory


class Nodes:
    """Lifecycle: `begin`, then `look` whenever there may be a node more."""

    def __init__(
        self,
        fleet: Fleet,
        supervisor: Supervisor,
        directory: RunDirectory,
        start: Callable[[Awaitable[None]], None],
        lose: Callable[[str], Awaitable[None]],
    ) -> None:
        """`start`: has something go on until the serving ends. `lose`: a member is gone."""
        self._fleet, self._supervisor, self._directory = fleet, supervisor, directory
        self._start, self._lose = start, lose
        self._watched: set[str] = set()
        """Nodes that may leave."""

    def begin(self) -> None:
        for name, handle in self._fleet.role("agent"):
            self._start(held_back(self._stay(name, handle)))

    def look(self) -> None:
        for node, name, handle in self._fleet.growth.later_nodes:
            if node not in self._watched:
                self._watched.add(node)
                self._start(self._may_leave(node, name, handle))

    async def _stay(self, name: str, handle: Any) -> None:
        failure = await _ended(name, handle)
        self._supervisor.beyond_help("agent", name, failure)
        raise failure from None

    async def _may_leave(self, node: str, name: str, handle: Any) -> None:
        failure = await _ended(name, handle)
        self._directory.event("node_left", node=name.removeprefix("Agent-"), message=first_line(failure))
        for member in self._fleet.growth.names_on(node):
            await self._lose(member)
        self._watched.discard(node)
        self._fleet.growth.forget_node(node)


async def _ended(name: str, handle: Any) -> Exception:
    """What an agent's end came to: it ends with its run and not before."""
    try:
        await handle.run.remote()
    except Exception as error:  # noqa: BLE001 - every way in which an actor can fail has a named error
        return translate(error, name)
    return PartnerGone(f"{name} has ended before the run was over.")
