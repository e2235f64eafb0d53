"""The actors that a dataflow needs, what each reserves, and which share a device: decided before anything starts, from
the graph and the configuration.

`penstock validate` prints the plan, `assignment.py` gives each actor its node, `fleet/` carries it out.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ResourceError
from penstock.conf.reward import has_own_judge
from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport, scorers_share_gpus, shares_gpus
from penstock.metering.ray_export import Origin
from penstock.store.service.store_actor import STORE
from penstock.workers.reward.reward_registry import needs_answer

RUN_PREFIX = "penstock-"
"""Beginning of a run's namespace in Ray: `penstock-NAME-ID-START`."""
CREATED = ("store", "prompts", "trainer", "scorer", "compute", "rollout", "environment", "reward")
"""Roles in the order of creation. Where a node runs out of memory, Ray ends its newest actor first: those that cost
least to replace, and that run the user's code, come last."""
SHARING = ("trainer", "rollout")
"""Roles whose members may share a device: rank i and engine i."""
SCORING = "scorer"
"""Role whose members live with their ranks, where these share a GPU with engines."""
UNIT = 10_000
"""Number of units in one CPU or GPU: Ray counts in these parts."""
DRIVER = "driver"
"""Role and name of the driver, as the origin of measurements."""


@dataclass(frozen=True)
class ActorPlan:
    """The plan of an actor. `name` is what Ray's dashboard shows."""

    name: str
    role: str  # store, prompts, rollout, environment, reward, scorer, compute, trainer
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    stage: str | None = None
    rank: int = 0
    joins: bool = False
    """True if the actor joins after the start."""
    memory: int = 0
    """Bytes that the actor reserves of its node's memory."""
    policy: str = ""
    """Policy whose model the engine has, of several that are whole models."""


def plan_actors(flow: Dataflow, config: RunConfig) -> list[ActorPlan]:
    """Every actor of the run, in the order in which they are created."""
    cpus = config.cluster.cpus_per_worker
    trainer, rank_gpus = config.trainer, config.trainer.num_gpus_per_rank
    scorers, scorer_gpus = flow.scorers, rank_gpus
    actors = [ActorPlan(STORE, "store"), ActorPlan("Prompts", "prompts", stage="source")]
    samples = bool(flow.of_kind("rollout") or config.evaluation.every_steps)
    if samples:
        gpus = config.rollout.num_gpus_per_worker * config.rollout.tensor_parallel_size
        if has_gpus_of_ranks(config):  # Ray gives no actor parts of several GPUs
            gpus, rank_gpus = 0.0, 1.0
        policies = trainer.own_models or ("",)
        for index in range(config.num_engines):
            policy = policies[index % len(policies)]
            actors.append(ActorPlan(f"Rollout-{index}", "rollout", cpus, gpus, "rollout", index, policy=policy))
    if flow.has_environment:
        cpus_each = config.environment.cpus_per_worker
        for index in range(config.environment.num_workers):
            actors.append(ActorPlan(f"Environment-{index}", "environment", cpus_each, stage="rollout", rank=index))
    reward = config.reward
    scored = [stage.name for stage in flow.of_kind("reward")] or ["reward"] * (samples and not flow.has_environment)
    for index, name in enumerate(name for name in scored for _ in range(reward.num_workers)):
        gpus = reward.judge.num_gpus if has_own_judge(*reward_of(flow, name, config)) else 0.0
        rank = index % reward.num_workers
        actors.append(ActorPlan(f"Reward-{index}", "reward", reward.cpus_per_worker, gpus, name, rank))
    if scorers_share_gpus(config):
        rank_gpus, scorer_gpus = divide_gpu(rank_gpus, len(scorers))
    for stage in scorers:
        for rank in range(trainer.of_scorer(stage.name).num_ranks):
            name = f"Scorer-{stage.name}-{rank}"
            actors.append(ActorPlan(name, SCORING, cpus, scorer_gpus, stage.name, rank))
    computed = [stage for stage in flow.stages if stage.kind in ("compute", "filter") and not stage.is_in_trainer]
    actors.extend(ActorPlan(f"Compute-{stage.name}", "compute", stage=stage.name) for stage in computed)
    model = "policies" if len(flow.policies) > 1 else flow.policies[0]
    for rank in range(trainer.num_ranks):
        actors.append(ActorPlan(f"Trainer-{model}-{rank}", "trainer", cpus, rank_gpus, "train", rank))
    return sorted(actors, key=lambda actor: CREATED.index(actor.role))


def has_gpus_of_ranks(config: RunConfig) -> bool:
    """Return whether each engine has the GPUs of several ranks, as many as it has parallel parts: the ranks reserve
    them whole, and the engine gets their numbers."""
    return config.placement == "colocated" and shares_gpus(config) and config.rollout.tensor_parallel_size > 1


def divide_gpu(num_gpus: float, num_scorers: int) -> tuple[float, float]:
    """Parts of a GPU of a rank and of each of the scorers that live with it. `num_gpus`: what they have together. The
    rank has what is left of Ray's last digit.

    >>> divide_gpu(0.5, 1), divide_gpu(0.5, 2)
    ((0.25, 0.25), (0.1668, 0.1666))
    """
    part = math.floor(round(UNIT * num_gpus) / (1 + num_scorers)) / UNIT
    return round(num_gpus - num_scorers * part, 4), part


def ranks_of(engine: ActorPlan, plan: Sequence[ActorPlan], config: RunConfig) -> list[str]:
    """Names of the ranks whose GPUs an engine has, where they are reserved by the ranks alone."""
    size = config.rollout.tensor_parallel_size
    own = range(engine.rank * size, (engine.rank + 1) * size)
    return [actor.name for actor in plan if actor.role == "trainer" and actor.rank in own]


def reward_of(flow: Dataflow, stage: str, config: RunConfig) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the reward of a stage; an empty name where the dataflow brings a function."""
    found = [one for one in flow.of_kind("reward") if one.name == stage]  # none: for evaluation alone
    if found and found[0].function is not None:
        return "", config.reward.options
    reward = found[0].rewarded if found and found[0].rewarded is not None else config.reward
    return reward.function, reward.options


def answers_are_needed(flow: Dataflow, config: RunConfig, *, held_out: bool = False) -> bool:
    """Return whether a reward needs the answers of the prompts. Raises `ConfigError` for one that is not found."""
    if flow.has_environment:
        return False
    functions = {stage.name: stage.function for stage in flow.of_kind("reward")}
    for stage, function in functions.items() or ({"": None}.items() if held_out else ()):
        name, options = reward_of(flow, stage, config)
        if needs_answer(function or name, options, config.data.columns.answer):
            return True
    return False


def needed(actors: Sequence[ActorPlan]) -> tuple[float, float]:
    """Numbers of CPUs and GPUs that the plan reserves in all."""
    return sum(actor.num_cpus for actor in actors), sum(actor.num_gpus for actor in actors)


def check_fits(actors: Sequence[ActorPlan], num_cpus: float, num_gpus: float, where: str = "the cluster has") -> None:
    """Raise `ResourceError` unless as much is there as the plan reserves in sum."""
    cpus, gpus = needed(actors)
    if gpus > num_gpus:
        raise ResourceError(
            f"The run asks for {gpus:g} GPU(s) and {where} {num_gpus:g}. Lower rollout.num_gpus_per_worker, "
            "rollout.num_workers, trainer.num_gpus_per_rank or trainer.num_ranks, point RAY_ADDRESS to a larger "
            "cluster, or run on the CPU: model=tiny takes a small model, model=tiny model.path=DIRECTORY one of yours."
        )
    if cpus > num_cpus:
        raise ResourceError(
            f"The run reserves {cpus:g} CPU(s) and {where} {num_cpus:g}. Lower cluster.cpus_per_worker or "
            "reward.cpus_per_worker (0 reserves none), rollout.num_workers or trainer.num_ranks, or point RAY_ADDRESS "
            "to a larger cluster."
        )


def pairs(plan: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that share devices, by the engine's rank: they take turns (`placement=colocated`), or weights are handed
    over in the memory of one GPU (`weights.transport=ipc`). On GPUs a rank's scorers are with it. Empty where none do.
    The last ones may be alone, where there are more engines than ranks or fewer."""
    roles = (*SHARING, SCORING) if scorers_share_gpus(config) else SHARING
    members = [actor for actor in plan if actor.role in roles]
    if not members or (config.placement != "colocated" and choose_transport(config) != "ipc"):
        return []
    size = config.rollout.tensor_parallel_size if has_gpus_of_ranks(config) else 1
    places = [actor.rank if actor.role == "rollout" else actor.rank // size for actor in members]
    together: list[list[ActorPlan]] = [[] for _ in range(1 + max(places))]
    for actor, place in zip(members, places, strict=True):
        together[place].append(actor)
    return together


def plan_sharing(plan: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that Ray has to give the same GPU, one list a GPU; empty where none has one."""
    members = [actor for actor in plan if actor.num_gpus]
    if not has_gpus_of_ranks(config):
        return pairs(members, config)
    of_gpu: dict[int, list[ActorPlan]] = {}
    for actor in members:
        if actor.role in ("trainer", SCORING):
            of_gpu.setdefault(actor.rank, []).append(actor)
    return [unit for unit in of_gpu.values() if len(unit) > 1]


def start_rounds(
    teams: Sequence[Sequence[str]], plan: Sequence[ActorPlan], config: RunConfig
) -> list[list[Sequence[str]]]:
    """Teams that start at the same time, one list after the other: where engines and ranks have parts of the same GPUs
    the ranks come after them, as an engine takes its share of the memory that it finds free, and then the scorers."""
    late = {"trainer": 1, SCORING: 2} if shares_gpus(config) else {}
    round_of = {actor.name: late.get(actor.role, 0) for actor in plan}
    rounds = [[team for team in teams if round_of[team[0]] == number] for number in range(3)]
    return [found for found in rounds if found]


def run_of(namespace: str) -> tuple[str, str] | None:
    """The name and the id of the run that has a namespace of Ray's; None: it is no run's.

    >>> run_of("penstock-my-sums-0123abcd-89abcdef")
    ('my-sums', '0123abcd')
    """
    found = re.fullmatch(rf"{RUN_PREFIX}(.+)-([0-9a-f]{{8}})-[0-9a-f]{{8}}", namespace)
    return (found[1], found[2]) if found else None


def origin_of(config: RunConfig, namespace: str, role: str, actor: str) -> Origin | None:
    """The origin of an actor's measurements; None where the run exports none."""
    run, run_id = run_of(namespace) or (config.name or "", "")
    return Origin(run, run_id, role, actor) if "ray" in config.tracking.sinks else None
