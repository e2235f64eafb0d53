"""A run as it is carried out: its complete configuration, and what follows from it.

RunConfig ─▶ resolve ─▶ ResolvedRun: checks, `penstock validate`, sweeps, plans, simulations
                            │
          plan_run: placement and memory for the GPUs that are there (plan=auto)
                            │ on a cluster
                            ▼
          resolve_auto (`memory_view.py`): what was `auto`, and the memory of actors
                            ▼
          with_models (`run.py`): the models that training starts from ─▶ actors
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.run import RunConfig, WarmStartConfig, validate
from penstock.conf.trainer import PolicyConfig, TrainerConfig
from penstock.conf.weights import choose_transport
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.configuration.compose import load_config, make_paths_absolute
from penstock.orchestrator.configuration.recipes import load_file


@dataclass(frozen=True)
class ResolvedRun:
    """A run with all that is known of it. Later steps return a copy with more."""

    config: RunConfig
    """The configuration with absolute paths, its sections checked against each other."""
    flow: Dataflow
    plan: list[ActorPlan]
    """The actors of the run."""
    model_path: str = ""
    """The model that training starts from; empty as long as none is made."""

    @property
    def first_runs(self) -> list[WarmStartConfig]:
        """The runs that come before this one, for its models."""
        config = self.config
        starts = [config.warm_start] if config.warm_start.recipe and config.model.path is None else []
        return starts + [start for name, start in config.other_models.items() if name not in config.model.paths]


def resolve(config: RunConfig, flow: Dataflow | None = None) -> ResolvedRun:
    """Resolve a configuration, loaded or made in Python, which is not changed: paths become absolute, the user's files
    are imported. `flow`: the user's own dataflow; None: that of `config.algorithm`. Raises `ConfigError` for what
    `load_config` refuses."""
    own = deepcopy(config)
    make_paths_absolute(own, Path.cwd())
    own.imports = [str(Path(file).expanduser().resolve()) for file in own.imports]
    for file in own.imports:
        load_file(Path(file), "imports")
    validate(own)
    graph = dataflow_of(own, flow)
    check_scorer_ranks(own, graph)
    resolve_policies(own, graph)
    return ResolvedRun(own, graph, plan_actors(graph, own))


def check_scorer_ranks(config: RunConfig, flow: Dataflow) -> None:
    """Raise `ConfigError` if a number of ranks is given for a scorer that the dataflow lacks."""
    scorers = [stage.name for stage in flow.scorers]
    if unknown := next((name for name in config.trainer.scorer_ranks if name not in scorers), None):
        known = suggest(unknown, scorers) if scorers else ": it has none. Leave the key out."
        raise ConfigError(f"trainer.scorer_ranks.{unknown}: the dataflow has no such scorer{known}")


def resolve_policies(config: RunConfig, flow: Dataflow) -> None:
    """Write the policies of a dataflow that trains several into the configuration, in its order. Raises `ConfigError`
    for others that it names, and for a configuration in which there can be one policy alone."""
    names, trainer = flow.policies, config.trainer
    policy, is_by_policy, _ = config.checkpoint.best_metric.partition("/heldout_reward/")
    if config.checkpoint.keep_best and is_by_policy and (len(names) < 2 or policy not in names):
        raise ConfigError(
            f"checkpoint.best_metric={config.checkpoint.best_metric}: flow.train names no policy {policy!r} beside "
            f"another{suggest(policy, names)}"
        )
    if len(names) < 2:
        if trainer.policies:
            raise ConfigError("trainer.policies: the dataflow trains one policy alone. Set trainer.optimizer.")
        return
    if unknown := next((name for name in trainer.policies if name not in names), None):
        raise ConfigError(f"trainer.policies.{unknown}: flow.train names no such policy{suggest(unknown, names)}")
    trainer.policies = {name: trainer.policies.get(name, PolicyConfig()) for name in names}
    for name in names:
        trainer.optimizer_of(name)
    single = {
        "trainer.replay.share above 0": trainer.replay.share > 0,
        f"data.curriculum.by={config.data.curriculum.by}": config.data.curriculum.by is not None,
        "trainer.compile=true": trainer.compile,
    }
    if trainer.own_models:
        _check_own_models(config, flow)
        _check_own_ranks(trainer, flow)
        what = "whole models (trainer.lora.rank=0)"
    else:
        single = {
            "trainer.lora.publish=merged": not trainer.lora.publishes_adapter,
            f"rollout.engine={config.rollout.engine}": not config.rollout.capabilities.serves_adapters,
            **{f"model.paths.{name}": name in config.model.paths for name in names},
            **{f"trainer.policies.{name}.num_ranks": name in trainer.policy_ranks for name in names},
            **single,
        }
        what = "adapters of one model (trainer.lora.rank above 0, trainer.lora.publish=adapter)"
    if reason := next((key for key, applies in single.items() if applies), None):
        raise ConfigError(
            f"{reason}: the dataflow trains {' and '.join(names)}, which are {what}, without replay, curriculum and "
            "trainer.compile."
        )


def _check_own_models(config: RunConfig, flow: Dataflow) -> None:
    """Refuse what policies that are whole models cannot have. Raises `ConfigError`."""
    rollout, names = config.rollout, config.trainer.own_models
    starts = [name for name in names if name in config.model.paths]
    has_reference = any(stage.model == "reference" for stage in flow.of_kind("logprobs"))
    refused = {
        f"rollout.num_workers={rollout.num_workers}": (
            rollout.follows_cluster or rollout.least_workers < len(names),
            f"each has engines of its own. Set it to a number, {len(names)} at least",
        ),
        f"evaluation.num_workers={config.evaluation.num_workers}": (
            config.evaluation.num_workers > 0, "all engines evaluate. Set it to 0",
        ),
        f"trainer.engine={config.trainer.engine}": (config.trainer.engine != "fsdp", "set trainer.engine=fsdp"),
        f"weights.transport={config.weights.transport}": (
            choose_transport(config) != "shm", "one publication has all. Set weights.transport=shm",
        ),
        f"rollout.max_pictures={rollout.max_pictures}": (rollout.max_pictures > 0, "they read text. Set it to 0"),
        "rollout.router_replay=true": (rollout.router_replay, "set it to false"),
        "model.reference_path=null": (
            has_reference and config.model.reference_path is None and bool(starts),
            f"{' and '.join(starts)} of model.paths, so that none is the start of all. Set it to a model's directory",
        ),
    }  # fmt: skip
    for key, (applies, advice) in refused.items():
        if applies:
            raise ConfigError(
                f"{key}: the dataflow trains {' and '.join(names)}, which are whole models (trainer.lora.rank=0): "
                f"{advice}, or make them adapters of one (trainer.lora.rank=16, trainer.lora.publish=adapter)."
            )


def _check_own_ranks(trainer: TrainerConfig, flow: Dataflow) -> None:
    """Refuse numbers of ranks of policies that do not make up all ranks, and what all ranks would have to compute
    together. Raises `ConfigError`."""
    if not (of_policies := trainer.policy_ranks):
        return
    numbers = ", ".join(f"{name} {len(of_policies.get(name, ()))}" for name in trainer.policies)
    key = f"trainer.policies.<name>.num_ranks ({numbers})"
    if missing := next((name for name in trainer.policies if name not in of_policies), None):
        raise ConfigError(f"{key}: {missing} has none. Give each policy ranks of its own, or none of them.")
    if (total := sum(map(len, of_policies.values()))) != trainer.num_ranks:
        raise ConfigError(f"{key}: together {total}, and trainer.num_ranks={trainer.num_ranks}. Set that to {total}.")
    if any(stage.kind in ("values", "critic") for stage in flow.in_trainer):
        raise ConfigError(
            f"{key}: the critic is trained by all ranks. Leave these keys out, or train without a critic."
        )
    for name in of_policies:
        try:
            trainer.of_policy(name)
        except ConfigError as error:
            raise ConfigError(f"trainer.policies.{name}.num_ranks={len(of_policies[name])}: {error}") from None


planners: list[Callable[[ResolvedRun, Callable[[str], None]], ResolvedRun]] = []
"""Planners of `plan=auto`: `penstock.planner.planned_runs`, of the layer above, adds its own."""


def plan_run(run: ResolvedRun, tell: Callable[[str], None]) -> ResolvedRun:
    """The run as it is planned for the GPUs that are there, which `tell` is told. Raises `ResourceError` where nothing
    fits them."""
    for plan in planners:
        run = plan(run, tell)
    return run


def resolve_first(first: WarmStartConfig) -> ResolvedRun:
    """Resolve a run that comes before another."""
    return resolve(load_config([f"recipe={first.recipe}", *first.overrides]))
