"""The trainer's ranks of a command that has died: they may be in the middle of anything. Called by `training.py`,
before the controller begins.

    attach: who waits for a batch does so no more ─▶ all are idle ─▶ which step was trained last? ─▶ they have its state

Ranks that cannot be brought there are ended: whoever calls them next hears of it, and has others take their place
(`faults/trainer_recovery.py`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.conf.errors import LeaseExpired, PenstockError
from penstock.orchestrator.fleet.fleet import Fleet
from penstock.orchestrator.ray_calls import answer, answers, outcomes
from penstock.store.client.client import StoreClient
from penstock.store.service.actor import STORE
from penstock.workers.progress import IDLE, Progress
from penstock.workers.trainer.report import StepReport

STAGE = "train"
LOOK_S = 0.1
"""Between two looks at ranks that are busy."""
APART_S = 30.0
"""Some ranks are busy, and others are not, for so long: they wait for what the others were never told."""
ANSWER_S = 60.0


async def take_up(fleet: Fleet, made: Mapping[int, Sequence[StepReport]]) -> int:
    """The last step that was trained; the ranks are idle and have its state, or are dead. `made`: reports of steps that
    all of them have made. Raises what the store fails with."""
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
    """Wait until no rank does anything. False: that cannot be waited for."""
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
    """Every rank has the state after that step."""
    ranks, timeout_s = fleet.role("trainer"), fleet.config.trainer.collective_timeout_s
    try:
        calls = [(name, handle.after_step.remote()) for name, handle in ranks]
        if set(await answers(calls, phase="look at the ranks", timeout_s=ANSWER_S)) != {trained}:
            calls = [(name, handle.restore.remote(trained)) for name, handle in ranks]
            await answers(calls, phase=f"restore step {trained}", timeout_s=timeout_s)
    except PenstockError:
        return False
    return True
