"""Finds what a command that has died has left of a run, before the run is set back to a checkpoint.

cluster.json ─▶ the run's `Owner` there ─▶ the same settings and code? ─▶ its actors are this command's now
                      │ none                      │ no: they end
                      └────────────▶ from the newest checkpoint ◀┘
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from penstock.conf.errors import DeadlineExceeded, PenstockError
from penstock.orchestrator.cluster.owners import RunOwner
from penstock.orchestrator.membership.run_state import Identity, RunState, unpack
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.trainer.report import StepReport


@dataclass(frozen=True)
class LeftBehind:
    """Actors of a run that only this process drives from now on."""

    owner: RunOwner
    state: RunState
    handles: dict[str, Any]
    """Handles of the run's actors, by their names in Ray."""
    reports: dict[int, list[StepReport]]
    """Reports of the step that all ranks made last, and of those before it that had more to come, by step."""
    silent_s: float
    """Seconds since the command before was heard of."""


def find(directory: RunDirectory, identity: Identity, lease_s: float, tell: Callable[[str], None]) -> LeftBehind | None:
    """The run's actors on the cluster that this process is connected to. None: nothing to go on with; actors that are
    there end, and `tell` is called with the reason."""
    try:
        found = json.loads(directory.cluster_file.read_text())
    except (OSError, ValueError):
        return None
    if found["address"] != ray.get_runtime_context().gcs_address:
        return None
    over = f"{directory.path.name}: its actors are there, but {{}}. They end, and it goes on from its checkpoint."
    try:
        taken = RunOwner.take(found["namespace"], lease_s)
    except DeadlineExceeded as late:
        tell(over.format(f"their owner does not answer ({late})"))
        return None
    except PenstockError:  # it ends at this moment
        return None
    if taken is None:
        return None
    owner, kept = taken
    state = unpack(kept.state, identity)
    if isinstance(state, str):
        owner.close()
        tell(over.format(state))
        return None
    try:
        handles = owner.keep_only(state.fleet.all_names, state.fleet.reservation.groups)
    except DeadlineExceeded as late:
        owner.close()
        tell(over.format(f"their owner does not answer ({late})"))
        return None
    return LeftBehind(owner, state, handles, pickle.loads(kept.step) if kept.step is not None else {}, kept.silent_s)
