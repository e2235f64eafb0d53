"""Which actors live on the same GPU (`placement=colocated`): rank i of the trainer and engine i, by a placement group.

    bundle 0: GPU 3   Trainer-policy-0 (0.5)   Rollout-0 (0.5)
    bundle 1: GPU 5   Trainer-policy-1 (0.5)   Rollout-1 (0.5)

Without it Ray packs parts of GPUs as they come, two ranks onto one GPU and two engines onto the next. Called by
`fleet.py`.
"""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.placement import ActorPlan

ROLES = ("trainer", "rollout")


def plan_sharing(plan: list[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Who shares a GPU with whom, one list a GPU; nothing where nobody does. The last ones may be alone, where there
    are more engines than ranks or the other way round."""
    members = [actor for actor in plan if actor.role in ROLES and actor.num_gpus]
    if config.placement != "colocated" or not members:
        return []
    shared: list[list[ActorPlan]] = [[] for _ in range(1 + max(actor.rank for actor in members))]
    for actor in members:
        shared[actor.rank].append(actor)
    return shared


class SharedDevices:
    """Lifecycle: `reserve` before the actors are created, `options` for each of them, `release` at the end."""

    def __init__(self, shared: list[list[ActorPlan]]) -> None:
        self._index = {actor.name: index for index, actors in enumerate(shared) for actor in actors}
        self._bundles = [
            {"CPU": sum(actor.num_cpus for actor in actors), "GPU": sum(actor.num_gpus for actor in actors)}
            for actors in shared
        ]
        self._group: PlacementGroup | None = None

    def reserve(self, timeout_s: float) -> None:
        """Nothing where nobody shares. Raises `ResourceError` if the cluster does not have it in time."""
        if not self._bundles:
            return
        bundles = [{kind: amount for kind, amount in bundle.items() if amount} for bundle in self._bundles]
        self._group = placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=timeout_s)
        except GetTimeoutError:
            self.release()
            raise ResourceError(
                f"placement=colocated wants {len(bundles)} GPU(s), each shared by a rank and an engine "
                f"({bundles[0]}), and the cluster did not free them within {timeout_s:g} s. See `ray status` for who "
                "has them, or lower trainer.num_ranks and rollout.num_workers."
            ) from None

    def options(self, actor: ActorPlan) -> dict[str, Any]:
        """What Ray is told about where the actor goes."""
        if self._group is None or actor.name not in self._index:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, self._index[actor.name])}

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
