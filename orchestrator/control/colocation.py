"""Turns on devices that engines and trainers share (`placement=colocated`).

    generation:  trainers have made room, engines are awake ─▶ the store has a batch
    training:    engines sleep, trainers are back ─▶ update, publication

Rank i and engine i have one GPU: `placement/reservation.py`. With devices of their own, all are there all the time, and
none waits for a turn.
"""

from collections.abc import Callable
from typing import Any

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.ray_calls import Handles, answer, answers
from penstock.store.client.client import StoreClient


class DeviceTurns:
    """Lifecycle: `generation` before the first batch is waited for, then `training` and `generation` in turn."""

    def __init__(self, role: Callable[[str], Handles], store: StoreClient, config: RunConfig) -> None:
        """`role`: names and handles of a role's actors, as `Fleet.role` has them."""
        self._role, self._store, self._config = role, store, config
        self._takes_turns = config.placement == "colocated" and bool(role("rollout"))

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
        calls: list[tuple[str, Any]] = [(name, getattr(handle, method).remote()) for name, handle in self._role(role)]
        phase = f"{role}: {method.replace('_', ' ')}"
        await answers(calls, phase=phase, timeout_s=self._config.weights.phase_timeout_s)
