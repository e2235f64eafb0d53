"""Brings the trainer's ranks of a command that has died to a known state, before the controller begins.

    attach: no rank waits for a batch any more ─▶ all are idle ─▶ which step was trained last? ─▶ they have its state

Ranks that cannot be brought there are ended: their next caller hears of it, and has others take their place
(`membership/trainer_recovery.py`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.conf.errors import LeaseExpired, PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer, answers, outcomes
from penstock.store.client.client import StoreClient
from penstock.store.service.actor import STORE
from penstock.workers.progress import IDLE, Progress
from penstock.workers.trainer.report import StepReport

STAGE = "train"
LOOK_S = 0.1
"""Seconds between two looks at ranks that are busy."""
APART_S = 30.0
"""Seconds for which some ranks may be busy and others not: after that, the busy ones wait for what the others were
never told."""
ANSWER_S = 60.0


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
        trained = int(await answer(client.settle(STAGE), name=STORE, phase="settle", timeout_s=ANSWER_S))
    finally:
        await client.leave()
    if not (is_idle and await _restored(fleet, trained)):
        fleet.kill([name for name, _ in fleet.role("trainer")])
    return trained


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
            calls = [(name, handle.restore.remote(trained)) for name, handle in ranks]
            await answers(calls, phase=f"restore step {trained}", timeout_s=timeout_s)
    except PenstockError:
        return False
    return True
