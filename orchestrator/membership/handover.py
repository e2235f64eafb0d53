"""The state that a command leaves for the one that may come after it, told to the run's owner while the run goes on.

    every second    which actors are where, if that has changed
    each step       the ranks' reports (`store_recovery.py`)

The next command can only read what one of the same code has written, so what tells them apart is read first: the same
settings, the same code, on the same node. How it goes on with the state is in `takeover.py`.
"""

import asyncio
import hashlib
import inspect
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import FleetState
from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.orchestrator.run_directory.checkpoint import Checkpoint

KEEP_S, LONGEST_S = 1.0, 10.0
"""Seconds between two looks at what has changed, least and most. A member that has come since is not known to the next
command, and ends."""
SHARE = 2000.0
"""Pause after a long look, in multiples of its time: with a thousand members there is a look every two or three
seconds."""
MAY_DIFFER = ("resume",)
"""Keys that say how a command begins, but not what the run is."""
MAX_TOLD = 3


class Handover:
    """Lifecycle: `run` once the fleet serves, until it is cancelled; `leave` when there is nothing more to go on
    with. Where the actors end with this process, none of it does anything."""

    def __init__(self, owner: Owner, describe: Callable[[RunOwner], bytes]) -> None:
        """`describe`: returns the present state of the run."""
        self._owner = owner if isinstance(owner, RunOwner) else None
        self._describe = describe
        self._kept = b""
        self._took_s = 0.0
        """CPU seconds of this thread to describe the run the last time."""

    async def keep(self) -> None:
        """Keep the present state, if it has changed. Raises `TakenOver`, `WorkerDied`, `DeadlineExceeded`, as the
        others do."""
        if self._owner is None:
            return
        began = time.thread_time()
        state = self._describe(self._owner)
        self._took_s = time.thread_time() - began
        if state != self._kept:
            await self._owner.keep(state)
            self._kept = state

    async def run(self) -> None:
        while self._owner is not None:
            await self.keep()
            await asyncio.sleep(min(LONGEST_S, max(KEEP_S, SHARE * self._took_s)))

    async def leave(self) -> None:
        """Keep nothing from now on: the run is over, or its actors are."""
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.leave()


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
