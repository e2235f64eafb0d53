"""Runs that are planned for the GPUs that are there, without being asked (`plan=auto`): those of commands, and runs and
sessions of Python programs.

    is it for GPUs? ─▶ nodes ─▶ do actors of its last command live? ─ no ─▶ the best plan with the keys that are given
                                                └─ yes: the numbers of its config.yaml, or they could not be taken over

One line says what was chosen and why.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from penstock.conf.errors import ConfigError, PenstockError, ResourceError
from penstock.conf.run import PLANNED, RunConfig, validate
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.ray_cluster import has_owner
from penstock.orchestrator.configuration.compose import given_keys, load_config
from penstock.orchestrator.configuration.resolved import ResolvedRun, planners, resolve
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.planner.calibration import value_at_key
from penstock.planner.candidates import ON_GPUS, with_keys
from penstock.planner.plan_inputs import nodes_here, overrides_of, search_of, uncounted_keys
from penstock.planner.plan_view import plan_title, step_parts
from penstock.planner.search import LEAST_GAIN, Plan, Search, drop_marginal_engines, plan_of
from penstock.planner.shared_gpus import needs_parts, parts_of_gpus

KEPT = {"max_staleness", *ON_GPUS} - {"plan"}
"""Keys that a run's own plan never changes: they change results."""
AS_IT_IS: Mapping[str, Any] = {"plan": "never"}
Tell = Callable[[str], None]


def with_plan(overrides: Sequence[str], console: Console) -> list[str]:
    """The words of a run, with those of its plan. Raises `ResourceError` where nothing fits."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    run = resolve(load_config(overrides))
    return [*overrides, *overrides_of(run.config, [*chosen_keys(run, say).items()])]


def planned(run: ResolvedRun, tell: Tell) -> ResolvedRun:
    """The run with the keys of its plan. Raises `ResourceError` where nothing fits."""
    if not (keys := chosen_keys(run, tell)):
        return run
    config = with_keys(run.config, keys)
    validate(config)
    return replace(run, config=config, plan=plan_actors(run.flow, config))


planners.append(planned)


def chosen_keys(run: ResolvedRun, tell: Tell) -> Mapping[str, Any]:
    """Keys of a run's plan with their values; none for a run that is not planned. Raises `ResourceError` where nothing
    fits, unless that is because of keys that are given: then these are checked as without a plan."""
    config, shares = run.config, needs_parts(run, given_keys(run.config))
    try:
        nodes = nodes_here(config.cluster) if shares or is_planned(run) else ()
    except ResourceError:  # a cluster that does not answer, which the checks of a run say
        return {}
    if not any(node.gpus for node in nodes):
        return {}
    given = given_keys(config) - {"plan"}
    if (before := _directory(config)) is not None and _lives(before):
        values = before.read_config()
        found = {key: value_at_key(values, key) for key in PLANNED if key not in given}
        keys = {key: value for key, value in found.items() if value is not None}
        tell(f"plan: that of {before.path.name}/config.yaml, whose actors are there ({_words(config, keys)})")
        return keys
    if shares:
        if keys := parts_of_gpus(run, given, int(sum(node.gpus for node in nodes))):
            tell(f"GPUs: vLLM's build is one for GPUs, so the run takes a part of one ({_words(config, keys)})")
        return keys
    try:
        search = replace(search_of(config, None, None, nodes, run.flow), given=frozenset(given | KEPT))
    except (ConfigError, ResourceError) as error:  # an unknown model or GPU
        tell(f"plan: as the keys say. {error}")
        return AS_IT_IS
    try:
        whole = plan_of(search)
    except ResourceError as error:
        if not given & {*PLANNED}:
            raise
        tell(f"plan: as the keys say. {error}")
        return AS_IT_IS
    best = drop_marginal_engines(search, whole)
    keys = dict(best.candidate.keys)
    more = _free(search, whole, best) + (_changed(before, best) if before is not None else "")
    if ignored := uncounted_keys(config):
        more += f"; not counted: {', '.join(ignored)}"
    tell(f"plan for {search.cluster_name}: {plan_title(best)}, about {step_parts(best)}{more} ({_words(config, keys)})")
    return keys


def is_planned(run: ResolvedRun) -> bool:
    """True for a run whose engines and ranks have GPUs, with no other models on them than scorers."""
    config = run.config
    if config.plan != "auto" or not (config.rollout.num_gpus_per_worker and config.trainer.num_gpus_per_rank):
        return False
    # An engine that is split over the GPUs of ranks reserves none itself.
    roles = {actor.role for actor in run.plan if actor.num_gpus or actor.role == "rollout"}
    can_plan = {"rollout", "trainer"} <= roles <= {"rollout", "trainer", "scorer"}
    return can_plan and config.rollout.capabilities.is_estimated


def _words(config: RunConfig, keys: Mapping[str, Any]) -> str:
    return shlex.join(overrides_of(config, [*keys.items()]))


def _free(search: Search, whole: Plan, best: Plan) -> str:
    """GPUs that stay free, and why. `whole`: the plan that `best` is, with all engines that there is room for."""
    if not (free := sum(nodes.num_gpus for nodes in search.cluster) - best.candidate.num_gpus):
        return ""
    reason = "too few for another engine or rank of this split"
    if best is not whole:
        reason = f"another engine would gain less than {LEAST_GAIN:.0%}"
    return f"; {free} GPUs stay free: {reason}"


def _changed(before: RunDirectory, plan: Plan) -> str:
    """Keys of a plan that have other values in the run that continues."""
    values = before.read_config()
    changed = [key for key, value in plan.candidate.keys if value_at_key(values, key) != value]
    return f"; the run had another split before: {', '.join(changed)} differ" * bool(changed)


def _directory(config: RunConfig) -> RunDirectory | None:
    """The directory of the run that `resume=auto` continues; None for a new run."""
    if config.resume != "auto" or config.name is None:
        return None
    try:
        found = RunDirectory.open(RunPlace.of_run(config).path)
        found.read_config()
    except (OSError, PenstockError):
        return None
    return found


def _lives(directory: RunDirectory) -> bool:
    """Return whether actors of the run's last command are on the cluster, so that this one may take them over."""
    try:
        namespace = json.loads(directory.cluster_file.read_text())["namespace"]
        return has_owner(namespace)
    except (OSError, ValueError, ResourceError):
        return False
