"""Parts of GPUs for a run that asks for none, such as that of `model=tiny`, where the vLLM that is installed is a build
for GPUs: it has no kernels for CPUs, so an engine that reserves nothing would compute on a GPU of somebody else's.
Pure, but for the look at what is installed.

    an engine               half a GPU, or whole ones where it is split over several
    one rank, its scorers   half a GPU together
    several ranks           none: they compute on CPUs, as two of them on one GPU could not meet by NCCL
    placement=colocated     rank i and engine i half a GPU each
"""

from collections.abc import Collection
from typing import Any

from penstock.orchestrator.cluster.placement.actors import divide_gpu
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.workers.runtime.builds import GPU, vllm_build

ENGINE, RANK = "rollout.num_gpus_per_worker", "trainer.num_gpus_per_rank"
HALF = 0.5


def needs_parts(run: ResolvedRun, given: Collection[str]) -> bool:
    """Return whether the run's engines have no GPU, nobody has said so, and they compute on GPUs alone. `given`: keys
    that the user has set."""
    rollout = run.config.rollout
    asks = run.config.plan == "auto" and not rollout.num_gpus_per_worker and ENGINE not in given
    samples = any(actor.role == "rollout" for actor in run.plan)
    return asks and samples and rollout.capabilities.has_builds and (vllm_build() or ("", ""))[0] == GPU


def parts_of_gpus(run: ResolvedRun, given: Collection[str], num_gpus: int) -> dict[str, Any]:
    """Keys that give the run's engines, and its rank if that may be, parts of GPUs; empty where there are too few:
    then the checks refuse the run. `num_gpus`: those that are there."""
    config = run.config
    num_engines, size = config.rollout.least_workers, config.rollout.tensor_parallel_size
    free = num_gpus - sum(actor.num_gpus for actor in run.plan)
    may_rank = RANK not in given and not config.trainer.num_gpus_per_rank
    if config.placement == "colocated":
        both = {ENGINE: HALF, RANK: HALF, "plan": "never"}
        return both if may_rank and max(num_engines * size, config.trainer.num_ranks) <= free else {}
    each = HALF if size == 1 else 1.0
    free -= num_engines * size * each
    if free < 0:
        return {}
    keys: dict[str, Any] = {ENGINE: each}
    if may_rank and config.trainer.num_ranks == 1 and free >= HALF:
        keys[RANK] = divide_gpu(HALF, sum(actor.role == "scorer" for actor in run.plan))[1]
    return {**keys, "plan": "never"}
