"""The driver's files on every node that reads them: models, checkpoints, a user's code. Used by `fleet.py`.

Nothing reads a path of another machine and hopes: a path means its content. A node where the same path has the same
content (a shared file system) uses it; another gets a copy from the agents, each of which passes it on. And the other
way round: what actors of other nodes write to the driver's disk is collected there.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray

from penstock.orchestrator.node_agents import NodeAgents
from penstock.orchestrator.ray_calls import answer, get_all
from penstock.workers.node.file_set import FileSet


def waves(has: Collection[str], wants: Collection[str]) -> list[list[tuple[str, str]]]:
    """Who fetches from whom, one list after the other: `(source, target)`. Whoever has it is a source of the next
    wave, so their number doubles."""
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
        """`timeout_s`: for one set of files to be everywhere."""
        self._agents, self._timeout_s = agents, timeout_s
        self._places: dict[tuple[str, str], str] = {}
        """By node and path as the driver knows it."""

    def provide(self, path: str, nodes: Collection[str], *, is_code: bool = False) -> None:
        """Have the directory, or a Python file with what lies beside it, on these nodes. Nothing happens for what is
        no path of this machine, such as a model hub's id. Raises `ResourceError`, `DeadlineExceeded`."""
        here = ray.get_runtime_context().get_node_id()
        facts = self._agents.facts(self._timeout_s)
        others = [
            node for node in nodes if facts[node].memory != facts[here].memory and (node, path) not in self._places
        ]
        source = Path(path).expanduser().resolve()
        if not others or not (source.is_file() if is_code else source.is_dir()):
            return
        folder = source.parent if is_code else source
        files = FileSet.of_code(source) if is_code else FileSet.of_directory(source)
        self._call([(here, ("offer", files, str(folder)))])
        for wave in waves([here], others):
            calls = [(target, ("obtain", files, str(folder), facts[origin].address)) for origin, target in wave]
            for (target, _), place in zip(calls, self._call(calls), strict=True):
                self._places[target, path] = f"{place}/{source.name}" if is_code else place

    def local(self, node: str, path: str) -> str:
        """Where that node has it."""
        return self._places.get((node, path), path)

    async def collect(self, directory: str, nodes: Collection[str]) -> None:
        """Have what actors on these nodes have written to that path on the driver's machine, where the path means
        another disk there. Raises `ResourceError`, `DeadlineExceeded`."""
        here = ray.get_runtime_context().get_node_id()
        facts = self._agents.facts(self._timeout_s)
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".seen-by-all-nodes-") as probe:
            for node in nodes:
                if facts[node].memory == facts[here].memory or await self._ask(node, "sees", probe.name):
                    continue
                files = await self._ask(node, "offer_all", directory)
                await self._ask(here, "collect", files, directory, facts[node].address)
                await self._ask(node, "withdraw", files)

    async def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        name, handle = self._agents.members[node]
        call = getattr(handle, method).remote(*arguments)
        return await answer(call, name=name, phase="collect files", timeout_s=self._timeout_s)

    def _call(self, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        named = []
        for node, (method, *arguments) in calls:
            name, handle = self._agents.members[node]
            named.append((name, getattr(handle, method).remote(*arguments)))
        return get_all(named, phase="bring files to every node", timeout_s=self._timeout_s)
