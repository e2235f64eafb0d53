"""Engines and trainers that share their devices take turns (`placement=colocated`). Called by `controller.py`.

    generation:  trainers have made room, engines are awake ─▶ the store has a batch
    training:    engines sleep, trainers are back ─▶ update, publication

With devices of their own, both are there all the time, and nobody waits for a turn.
"""

from typing import Any

from penstock.conf.run import RunConfig
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.waiting import answer, answers
from penstock.store.client.client import StoreClient


class Turns:
    """Lifecycle: `generation` before the first batch is waited for, then `training` and `generation` in turn."""

    def __init__(self, fleet: Fleet, store: StoreClient, config: RunConfig) -> None:
        self._fleet, self._store, self._config = fleet, store, config
        self._takes_turns = config.placement == "colocated" and bool(fleet.role("rollout"))

    async def training(self, step: int) -> None:
        """Wait for a batch, then give the devices to the trainers. Raises `DeadlineExceeded`, `WorkerDied`."""
        if not self._takes_turns:
            return
        phase, timeout_s = f"step {step}, waiting for its batch", self._config.trainer.step_timeout_s
        await answer(self._store.batch_ready(), name="Store", phase=phase, timeout_s=timeout_s)
        await self._all("rollout", "sleep")
        await self._all("trainer", "take_device")

    async def generation(self) -> None:
        """Give the devices to the engines."""
        if not self._takes_turns:
            return
        await self._all("trainer", "leave_device")
        await self._all("rollout", "wake")

    async def _all(self, role: str, method: str) -> None:
        calls: list[tuple[str, Any]] = [
            (name, getattr(handle, method).remote()) for name, handle in self._fleet.role(role)
        ]
        phase = f"{role}: {method.replace('_', ' ')}"
        await answers(calls, phase=phase, timeout_s=self._config.rollout.update_timeout_s)
