"""The state that a command leaves for the next one, and the check that it fits: the same settings, the same code, on
the same node. Pure but for reading files of code.

A command can only read what one of the same code has written, so what tells them apart is read first.
"""

import hashlib
import inspect
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.roster import FleetState
from penstock.orchestrator.run_directory.checkpoint import Checkpoint

MAY_DIFFER = ("resume",)
"""Keys that say how a command begins, but not what the run is."""
MAX_TOLD = 3


@dataclass(frozen=True)
class RunState:
    """The facts that another process needs to go on with a run."""

    namespace: str
    model_path: str
    model_paths: dict[str, str]
    resumed: Checkpoint | None
    """The checkpoint that the run's actors were started from."""
    wanted: dict[str, int]
    """Numbers of members that people have asked for, by role."""
    fleet: FleetState


@dataclass(frozen=True)
class Identity:
    """The facts that must be equal for one command to go on with another's actors."""

    node: str
    """Ray's id of the node that the command is on."""
    facts: dict[str, str]
    """Settings by key, and a digest of each file of code."""

    def difference(self, other: "Identity") -> str | None:
        """The reason why the other's actors do not fit this one, as half a sentence; None: they do."""
        if self.node != other.node:
            return "it was started on another node"
        names = [name for name in {**other.facts, **self.facts} if self.facts.get(name) != other.facts.get(name)]
        if not names:
            return None
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        return f"not the same as now: {', '.join(names[:MAX_TOLD])}{more}"


def identity_of(config: RunConfig, flow: Dataflow, node: str) -> Identity:
    """The identity of this command. `node`: the one that this process is on."""
    settings = {key: repr(value) for key, value in _flat(asdict(config)) if key not in MAY_DIFFER}
    return Identity(node, settings | {str(file): _digest(file) for file in _code(config, flow)})


def pack(identity: Identity, state: RunState) -> bytes:
    return pickle.dumps((identity.node, identity.facts, pickle.dumps(state)))


def unpack(packed: bytes, identity: Identity) -> RunState | str:
    """The state; or the reason why its identity differs, as half a sentence."""
    node, facts, state = pickle.loads(packed)
    if found := identity.difference(Identity(node, facts)):
        return found
    loaded: RunState = pickle.loads(state)
    return loaded


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested values to dotted keys.

    >>> list(_flat({"seed": 1, "trainer": {"max_steps": 2}}))
    [('seed', 1), ('trainer.max_steps', 2)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _code(config: RunConfig, flow: Dataflow) -> list[Path]:
    """Files that the dataflow's functions and the settings' names of functions come from."""
    files = {_file_of(stage.function) for stage in flow.stages}
    named = [*config.imports, config.reward.function, config.data.teacher or "", config.algorithm.name,
             config.environment.name or "", config.data.path or ""]  # fmt: skip
    files |= {f"{name.partition('.py')[0]}.py" for name in named if ".py" in name}
    files.add(__file__)
    return sorted({Path(file).expanduser().resolve() for file in files if file})


def _file_of(function: Any) -> str | None:
    """The file that a function, or the class of a callable, comes from; None if it has none."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsourcefile(function)
    except TypeError:  # built in
        return None


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "cannot be read"
