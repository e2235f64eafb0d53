"""Takeover: the next command drives the living actors of one that has died, before the run is set back to a checkpoint.

While a command drives the run, `Handover` tells the run's owner (`cluster/owners.py`) what the next one needs:

    every second    which actors are where, if that has changed
    each step       the ranks' reports (`restart.py`)

The next command can only read what one of the same code has written, so what tells them apart is read first: the same
settings, the same code, on the same node.

    cluster.json ─▶ the run's `Owner` there ─▶ the same settings and code? ─▶ its actors are this command's now
                          │ none                      │ no: they end                │
                          └────────────▶ from the newest checkpoint ◀┘              ▼
    which step was trained last? all ranks have its state ◀─ all are idle ◀─ attach: no rank waits for a batch any more

Ranks that cannot be brought there are ended: their next caller misses them, and restarts all ranks
(`control/step_loop.py`).
"""

import asyncio
import hashlib
import inspect
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.loss import AggregatedLoss
from penstock.algorithms.graph.stage import ByPolicy
from penstock.conf.errors import DeadlineExceeded, LeaseExpired, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet, FleetState
from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.orchestrator.cluster.ray_calls import answer, call_all, try_all
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_actor import STORE
from penstock.workers.runtime.serving import IDLE, Progress
from penstock.workers.trainer.step_report import StepReport

KEEP_S, LONGEST_S = 1.0, 10.0
"""Seconds between two looks at what has changed, least and most. A member that has come since is not known to the next
command, and ends."""
SHARE = 2000.0
"""Pause after a long look, in multiples of its time: with a thousand members there is a look every two or three
seconds."""
MAY_DIFFER = ("resume",)
"""Keys that say how a command begins, but not what the run is."""
MAX_NAMED = 3
"""Most names of settings or files in the reason why a run cannot be taken over."""
STAGE = "train"
PROGRESS_S = 0.1
"""Seconds between two checks of ranks that are busy."""
APART_S = 30.0
"""Seconds for which some ranks may be busy and others not: after that, the busy ones wait for a call that
the others never got."""
ANSWER_S = 60.0
"""Deadline for a rank or the store to answer."""


class Handover:
    """Lifecycle: `run` once the fleet serves, until it is cancelled; `leave` when there is nothing more to take
    over. Where the actors end with this process, none of it does anything."""

    def __init__(self, owner: Owner, describe: Callable[[RunOwner], bytes]) -> None:
        """`describe`: returns the present state of the run."""
        self._owner = owner if isinstance(owner, RunOwner) else None
        self._describe = describe
        self._kept = b""
        self._took_s = 0.0
        """CPU seconds of this thread to describe the run the last time."""

    async def keep(self) -> None:
        """Keep the present state, if it has changed. Raises `TakenOver`, `WorkerDied`, `DeadlineExceeded`, as `run`
        and `leave` do."""
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
    """The facts that another process needs to take a run over."""

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
    """The facts that must be equal for one command to take over another's actors."""

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
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"not the same as now: {', '.join(names[:MAX_NAMED])}{more}"


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
    each = [one.function.each if isinstance(one.function, ByPolicy) else one.losses for one in flow.stages]
    files = {_file_of(function) for functions in each for function in functions}
    named = [*config.imports, config.reward.function, config.data.teacher or "", config.algorithm.name,
             config.environment.name or "", config.data.path or ""]  # fmt: skip
    files |= {f"{name.partition('.py')[0]}.py" for name in named if ".py" in name}
    files.add(__file__)
    return sorted({Path(file).expanduser().resolve() for file in files if file})


def _file_of(function: Any) -> str | None:
    """The file that a function, or the class of a callable, comes from; None if it has none."""
    while isinstance(function, partial | AggregatedLoss):
        function = function.func if isinstance(function, partial) else function.function
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


@dataclass(frozen=True)
class OrphanedRun:
    """Actors of a run that only this process drives from now on."""

    owner: RunOwner
    state: RunState
    handles: dict[str, Any]
    """Handles of the run's actors, by their names in Ray."""
    reports: dict[int, list[StepReport]]
    """Reports of the step that all ranks made last, and of those before it that had more to come, by step."""
    silent_s: float
    """Seconds since the command before was heard of."""


def find_orphan(
    directory: RunDirectory, identity: Identity, lease_s: float, tell: Callable[[str], None]
) -> OrphanedRun | None:
    """The run's actors on the cluster that this process is connected to. None: there is nothing to take over; actors
    that are there end, and `tell` is called with the reason."""
    try:
        found = json.loads(directory.cluster_file.read_text())
    except (OSError, ValueError):
        return None
    if found["address"] != ray.get_runtime_context().gcs_address:
        return None
    owner: RunOwner | None = None
    try:
        if (taken := RunOwner.take(found["namespace"], lease_s)) is None:
            return None
        owner, kept = taken
        state = unpack(kept.state, identity)
        if isinstance(state, RunState):
            handles = owner.keep_only(state.fleet.all_names, state.fleet.reservation.groups)
            steps = pickle.loads(kept.steps) if kept.steps is not None else {}
            return OrphanedRun(owner, state, handles, steps, kept.silent_s)
        reason = state
    except DeadlineExceeded as late:
        reason = f"their owner does not answer ({late})"
    except PenstockError:
        if owner is None:  # it ends at this moment
            return None
        raise
    if owner is not None:
        owner.close()
    tell(
        f"{directory.path.name}: its actors are there, but {reason}. They end, and the run resumes from its checkpoint."
    )
    return None


async def settle_ranks(fleet: Fleet, made: Mapping[int, Sequence[StepReport]]) -> int:
    """Make the ranks idle, with the state of the last step that was trained, or kill them. Returns that step. `made`:
    reports of steps that all of them have made. Raises what the store fails with."""
    client = StoreClient(fleet.store)
    try:
        await fleet.attach_trainers()
        is_idle = await _wait_until_idle(fleet)
        shares = [report.share for _, reports in sorted(made.items()) for report in reports]
        for share in filter(None, shares):
            with suppress(LeaseExpired):  # the command before has completed it, or the step was lost
                await answer(client.complete_shared(share), name=STORE, phase="settle", timeout_s=ANSWER_S)
        settling = client.settle(STAGE, fleet.owner.epoch)
        trained = int(await answer(settling, name=STORE, phase="settle", timeout_s=ANSWER_S))
    finally:
        await client.leave()
    if not (is_idle and await _restore_ranks(fleet, trained)):
        fleet.kill([name for name, _ in fleet.role("trainer")])
    return trained


@dataclass(frozen=True)
class TakeoverPoint:
    """The point after step `step`, the last that was trained."""

    step: int
    unwritten: dict[int, Sequence[StepReport]]
    """Ranks' reports of steps up to that one whose metrics are not written yet, by step. What comes after the update is
    done again for the last step; the weights of those before, engines have had or need no more."""
    metrics: dict[str, Any]
    """The line of that step, if it is written."""

    @classmethod
    def of(
        cls, step: int, made: Mapping[int, Sequence[StepReport]], lines: Sequence[dict[str, Any]]
    ) -> "TakeoverPoint":
        """The point after `step`. `made`: reports of steps that were made, perhaps for nothing. `lines`:
        metrics.jsonl."""
        written = {int(line.get("step", 0)): line for line in lines}
        unwritten = {number: reports for number, reports in made.items() if number <= step and number not in written}
        return cls(step, unwritten, written.get(step, {}))


async def _wait_until_idle(fleet: Fleet) -> bool:
    """Wait until all ranks are idle. False: that cannot be waited for."""
    began, apart_since = time.monotonic(), None
    while time.monotonic() < began + fleet.config.trainer.step_timeout_s:
        found = await try_all(fleet.role("trainer"), "progress", phase="look at the ranks", timeout_s=ANSWER_S)
        busy = [not isinstance(said, Progress) or said.phase != IDLE for said in found]
        if not any(busy):
            return True
        if any(isinstance(said, Exception) for said in found):
            return False
        apart_since = None if all(busy) else apart_since or time.monotonic()
        if apart_since is not None and time.monotonic() > apart_since + APART_S:
            return False
        await asyncio.sleep(PROGRESS_S)
    return False


async def _restore_ranks(fleet: Fleet, trained: int) -> bool:
    """Give every rank the state after a step. Returns whether that worked."""
    ranks, timeout_s = fleet.role("trainer"), fleet.config.trainer.collective_timeout_s
    try:
        if set(await call_all(ranks, "after_step", phase="look at the ranks", timeout_s=ANSWER_S)) != {trained}:
            phase = f"restore step {trained}"
            await call_all(ranks, "restore", trained, fleet.owner.epoch, phase=phase, timeout_s=timeout_s)
    except PenstockError:
        return False
    return True
