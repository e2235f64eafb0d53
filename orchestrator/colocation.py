"""Engines and trainers on the same devices (`placement=colocated`): where they live, and when each has them.

    bundle 0: GPU 3   Trainer-policy-0 (0.5)   Rollout-0 (0.5)
    bundle 1: GPU 5   Trainer-policy-1 (0.5)   Rollout-1 (0.5)

    generation:  trainers have made room, engines are awake ─▶ the store has a batch
    training:    engines sleep, trainers are back ─▶ update, publication

Rank i and engine i get one GPU by a placement group: without it Ray packs parts of GPUs as they come, two ranks onto
one and two engines onto the next. With devices of their own, all are there all the time, and nobody waits for a turn.
Called by `fleet.py` (where) and `controller.py` (when).
"""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.ray_calls import answer, answers
from penstock.store.client.client import StoreClient


class SharedDevices:
    """Lifecycle: `reserve` before the actors are created, `options` for each of them, `release` at the end."""

    def __init__(self, shared: list[list[ActorPlan]]) -> None:
        self._index = {actor.name: index for index, actors in enumerate(shared) for actor in actors}
        self._bundles = [
            {"CPU": sum(actor.num_cpus for actor in actors), "GPU": sum(actor.num_gpus for actor in actors)}
            for actors in shared
        ]
        self._placement: PlacementGroup | None = None

    def reserve(self, timeout_s: float) -> None:
        """Nothing where nobody shares. Raises `ResourceError` if the cluster does not have it in time."""
        if not self._bundles:
            return
        bundles = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in self._bundles]
        self._placement = placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._placement.ready(), timeout=timeout_s)
        except GetTimeoutError:
            self.release()
            raise ResourceError(
                f"placement=colocated wants {len(bundles)} GPU(s), each shared by a rank and an engine "
                f"({bundles[0]}), and the cluster did not free them within {timeout_s:g} s. See `ray status` for who "
                "has them, or lower trainer.num_ranks and rollout.num_workers."
            ) from None

    def options(self, actor: ActorPlan) -> dict[str, Any]:
        """What Ray is told about where the actor goes."""
        if self._placement is None or actor.name not in self._index:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, self._index[actor.name])}

    def release(self) -> None:
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


class Turns:
    """Lifecycle: `generation` before the first batch is waited for, then `training` and `generation` in turn."""

    def __init__(self, role: Callable[[str], list[tuple[str, Any]]], store: StoreClient, config: RunConfig) -> None:
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
