"""Trials on the nodes of a fleet that has started, before the first step: numbers of CPU threads, and the sandbox.

`try_threads` finds the numbers for engines and ranks that share the cores of a node and run at the same time:

    an engine's decode steps ─┐
                              ├─ seconds a token, by threads ─▶ placement/threads.py: best ─▶ use_threads, threads.json
    the ranks' micro-batch   ─┘

No other process computes meanwhile, and nothing that is tried is trained. A run that goes on keeps what was found.

`try_fences` tries the sandbox for code of models where the cluster was there before the run: the nodes' agents do it,
before models are loaded.
"""

from collections.abc import Sequence

from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.threads import (
    SharedNode,
    Trial,
    are_tried,
    best,
    counts_to_try,
    shared_nodes,
    write_trials,
)
from penstock.orchestrator.cluster.ray_calls import get_all
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.sandbox.execution import Limits

PHASE = "trying numbers of threads"
RUN_CODE = ("reward", "environment")
"""Roles that run code."""


def try_threads(fleet: Fleet, directory: RunDirectory) -> None:
    """Try, and use what is found. Raises what an engine or a rank fails with, `DeadlineExceeded`."""
    if not are_tried(fleet.config):
        return
    found = shared_nodes(fleet.plan, fleet.reservation.assignment, fleet.cores)
    for node, members in found.items():
        if node not in fleet.trials:
            fleet.trials[node] = _tried(fleet, node, members)
    if found:
        _tell(fleet)
        write_trials(directory, fleet.trials)


def _tried(fleet: Fleet, node: SharedNode, members: Sequence[ActorPlan]) -> Trial:
    """Try on one node. `members`: an engine, and the ranks there. Ranks on other nodes compute along, as always."""
    engine, ranks = members[0], members[1:]
    config, timeout_s = fleet.config, fleet.config.rollout.start_timeout_s
    groups = (config.max_staleness + 1) * config.trainer.groups_per_step // len(fleet.role("rollout"))
    counts = counts_to_try(config.rollout.num_threads, node.cores)
    call = (engine.name, fleet.actors[engine.name].try_threads.remote(counts, groups))
    (engine_s,) = get_all([call], phase=PHASE, timeout_s=timeout_s)
    counts = counts_to_try(config.trainer.num_threads, node.cores)
    calls = [(name, handle.try_threads.remote(counts)) for name, handle in fleet.role("trainer")]
    answers = dict(zip((name for name, _ in calls), get_all(calls, phase=PHASE, timeout_s=timeout_s), strict=True))
    rank_s = {count: max(answers[rank.name][count] for rank in ranks) for count in counts}
    return Trial(best(node, engine_s, rank_s), engine_s, rank_s)


def _tell(fleet: Fleet) -> None:
    """Tell all engines and ranks what was found for them."""
    calls = [
        (name, handle.use_threads.remote(fleet.threads_of(name)))
        for role in ("rollout", "trainer")
        for name, handle in fleet.role(role)
    ]
    get_all(calls, phase=PHASE, timeout_s=fleet.config.rollout.start_timeout_s)


def try_fences(fleet: Fleet, all_limits: Sequence[Limits]) -> list[str]:
    """Try the sandbox. Returns a line for all nodes on which the same holds. Raises `SandboxUnavailable` naming a node,
    `DeadlineExceeded`."""
    timeout_s = fleet.config.rollout.start_timeout_s
    facts, members = fleet.agents.facts(timeout_s), fleet.agents.members
    homes = [fleet.node_of(name) for role in RUN_CODE for name, _ in fleet.role(role)]
    nodes = [node for node in dict.fromkeys(homes) if node in members]
    calls = [(members[node][0], members[node][1].try_fences.remote(all_limits)) for node in nodes]
    hosts: dict[str, list[str]] = {}
    for node, held in zip(nodes, get_all(calls, phase="trying the sandbox", timeout_s=timeout_s), strict=True):
        hosts.setdefault(held, []).append(facts[node].host)
    return [f"sandbox on {', '.join(names)}: {held}" for held, names in hosts.items()]
