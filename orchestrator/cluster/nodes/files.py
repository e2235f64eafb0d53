"""The driver's files on every node that reads them: models, checkpoints, a user's code.

A path stands for its content. A node where the same path has the same content (a shared file system) uses it; another
gets a copy from the agents, each of which passes it on. In the other direction, what actors of other nodes write to the
driver's disk is collected there.
"""

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray

from penstock.conf.errors import WorkerDied
from penstock.orchestrator.cluster.nodes.agents import NodeAgents
from penstock.orchestrator.cluster.ray_calls import answers, get_all
from penstock.workers.machine.files import is_url
from penstock.workers.node.agent import NodeFacts
from penstock.workers.node.file_service import FileSet


def waves(has: Collection[str], wants: Collection[str]) -> list[list[tuple[str, str]]]:
    """Transfers in waves, each a list of `(source, target)`. Each node that has the files is a source of the next wave,
    so the number of sources doubles."""
    sources, left = list(has), [node for node in wants if node not in has]
    planned = []
    while left:
        wave = list(zip(sources, left, strict=False))
        planned.append(wave)
        left = left[len(wave) :]
        sources += [target for _, target in wave]
    return planned


class NodeFiles:
    """Lifecycle: `provide` for each path before the actors that read it are made, then `local`."""

    def __init__(self, agents: NodeAgents, timeout_s: float) -> None:
        """`timeout_s`: deadline for one set of files to be everywhere."""
        self._agents, self._timeout_s = agents, timeout_s
        self._places: dict[tuple[str, str], str] = {}
        """Place of a path on a node, by node and the driver's path."""

    def provide(
        self, path: str, nodes: Collection[str], files_of: Callable[[Path], FileSet] = FileSet.of_model
    ) -> None:
        """Bring a model, or what else `files_of` finds by its path, to nodes. Nothing happens for what is no path of
        this machine, such as a model hub's id. Raises `ResourceError`, `DeadlineExceeded`."""
        others = [node for node in nodes if self._is_elsewhere(node) and (node, path) not in self._places]
        source = Path(path).expanduser().resolve()
        if not others or not source.exists():
            return
        folder = source if source.is_dir() else source.parent
        files = files_of(source)
        here = ray.get_runtime_context().get_node_id()
        self._wait("offer", {here: (files, str(folder))})
        for wave in waves([here], others):
            wanted = {target: (files, str(folder), self._facts_of(origin).address) for origin, target in wave}
            for target, place in self._wait("obtain", wanted).items():
                self._places[target, path] = place if source.is_dir() else f"{place}/{source.name}"

    @property
    def state(self) -> dict[tuple[str, str], str]:
        """The present state, for another process."""
        return dict(self._places)

    def adopt(self, places: Mapping[tuple[str, str], str]) -> None:
        """Go on with what another process has brought to nodes."""
        self._places = dict(places)

    def local(self, node: str, path: str) -> str:
        """The path of the same content on a node."""
        return self._places.get((node, path), path)

    async def places(self, directory: str, nodes: Collection[str]) -> dict[str, str]:
        """Directory that actors on each node are to write to, for what belongs into one of the driver's: that one, if
        they see it, else one of their own, for `collect`. A URL is the same everywhere."""
        places = dict.fromkeys(nodes, directory)
        others = [node for node in nodes if not is_url(directory) and self._is_elsewhere(node)]
        if not others:
            return places
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".seen-by-all-nodes-") as probe:
            seen = await self._all("sees", dict.fromkeys(others, (probe.name,)))
        unseen: dict[str, tuple[Any, ...]] = {node: () for node in others if not seen[node]}
        return places | await self._all("scratch", unseen)

    async def collect(self, directory: str, places: Mapping[str, str]) -> None:
        """Bring what was written into `places` to the directory on the driver's machine. Raises `ResourceError`,
        `DeadlineExceeded`."""
        here = ray.get_runtime_context().get_node_id()
        away: dict[str, tuple[Any, ...]] = {node: (place,) for node, place in places.items() if place != directory}
        for node, files in (await self._all("offer_all", away)).items():
            await self._all("collect", {here: (files, directory, self._facts_of(node).address)})
        await self.discard(directory, places)

    async def discard(self, directory: str, places: Mapping[str, str]) -> None:
        """Have nodes remove the places that they were given to write to instead of the directory."""
        await self._all("discard", {node: (place,) for node, place in places.items() if place != directory})

    def _is_elsewhere(self, node: str) -> bool:
        """Return whether the driver's paths may mean something else on a node."""
        memory = self._facts_of(node).memory
        return memory != self._facts_of(ray.get_runtime_context().get_node_id()).memory

    def _facts_of(self, node: str) -> NodeFacts:
        """The facts of a node. Raises `WorkerDied` for one that has left since its actors were looked up."""
        if (found := self._agents.facts(self._timeout_s).get(node)) is None:
            raise _gone(node)
        return found

    def _wait(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method on nodes at the same time. Returns the answers by node."""
        results = get_all(self._calls(method, arguments), phase="bring files to nodes", timeout_s=self._timeout_s)
        return dict(zip(arguments, results, strict=True))

    async def _all(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Do the same as `_wait` without blocking the event loop."""
        calls = self._calls(method, arguments)
        results = await answers(calls, phase="collect files", timeout_s=self._timeout_s) if calls else []
        return dict(zip(arguments, results, strict=True))

    def _calls(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
        calls = []
        for node, some in arguments.items():
            if node not in self._agents.members:
                raise _gone(node)
            name, handle = self._agents.members[node]
            calls.append((name, getattr(handle, method).remote(*some)))
        return calls


def _gone(node: str) -> WorkerDied:
    return WorkerDied(f"Node {node[:8]} has left, with what was to be read or written there.")
