"""The takeover of a run whose command has died, before the run is set back to a checkpoint: its actors live on, and the
next command drives them.

    cluster.json ─▶ the run's `Owner` there ─▶ the same settings and code? ─▶ its actors are this command's now
                          │ none                      │ no: they end                │
                          └────────────▶ from the newest checkpoint ◀┘              ▼
    which step was trained last? all ranks have its state ◀─ all are idle ◀─ attach: no rank waits for a batch any more

Ranks that cannot be brought there are ended: their next caller hears of it, and has others take their place
(`membership/trainer_recovery.py`).
"""

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from penstock.conf.errors import DeadlineExceeded, LeaseExpired, PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.owners import RunOwner
from penstock.orchestrator.cluster.ray_calls import answer, answers, outcomes
from penstock.orchestrator.membership.handover import Identity, RunState, unpack
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_actor import STORE
from penstock.workers.lifecycle.progress import IDLE, Progress
from penstock.workers.trainer.report import StepReport

STAGE = "train"
LOOK_S = 0.1
"""Seconds between two looks at ranks that are busy."""
APART_S = 30.0
"""Seconds for which some ranks may be busy and others not: after that, the busy ones wait for what the others were
never told."""
ANSWER_S = 60.0


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
    return LeftBehind(owner, state, handles, pickle.loads(kept.steps) if kept.steps is not None else {}, kept.silent_s)


async def take_up(fleet: Fleet, made: Mapping[int, Sequence[StepReport]]) -> int:
    """Make the ranks idle, with the state of the last step that was trained, or kill them. Returns that step. `made`:
    reports of steps that all of them have made. Raises what the store fails with."""
    client = StoreClient(fleet.store)
    try:
        await fleet.attach_trainers()
        is_idle = await _idle(fleet)
        shares = [report.share for _, reports in sorted(made.items()) for report in reports]
        for share in filter(None, shares):
            with suppress(LeaseExpired):  # the command before has told the store of it, or the step was lost
                await answer(client.complete_shared(share), name=STORE, phase="settle", timeout_s=ANSWER_S)
        settling = client.settle(STAGE, fleet.owner.epoch)
        trained = int(await answer(settling, name=STORE, phase="settle", timeout_s=ANSWER_S))
    finally:
        await client.leave()
    if not (is_idle and await _restored(fleet, trained)):
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


async def _idle(fleet: Fleet) -> bool:
    """Wait until all ranks are idle. False: that cannot be waited for."""
    began, apart_since = time.monotonic(), None
    while time.monotonic() < began + fleet.config.trainer.step_timeout_s:
        calls = [(name, handle.progress.remote()) for name, handle in fleet.role("trainer")]
        found = await outcomes(calls, phase="look at the ranks", timeout_s=ANSWER_S)
        busy = [not isinstance(said, Progress) or said.phase != IDLE for said in found]
        if not any(busy):
            return True
        if any(isinstance(said, Exception) for said in found):
            return False
        apart_since = None if all(busy) else apart_since or time.monotonic()
        if apart_since is not None and time.monotonic() > apart_since + APART_S:
            return False
        await asyncio.sleep(LOOK_S)
    return False


async def _restored(fleet: Fleet, trained: int) -> bool:
    """Give every rank the state after a step. Returns whether that worked."""
    ranks, timeout_s = fleet.role("trainer"), fleet.config.trainer.collective_timeout_s
    try:
        calls = [(name, handle.after_step.remote()) for name, handle in ranks]
        if set(await answers(calls, phase="look at the ranks", timeout_s=ANSWER_S)) != {trained}:
            calls = [(name, handle.restore.remote(trained, fleet.owner.epoch)) for name, handle in ranks]
            await answers(calls, phase=f"restore step {trained}", timeout_s=timeout_s)
    except PenstockError:
        return False
    return True
