"""Tries the sandbox for code of models on the nodes of a cluster that was there before the run: their agents try it,
before models are loaded. For a local cluster `configuration/sandbox_check.py` does it.
"""

from collections.abc import Sequence

from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import get_all
from penstock.workers.sandbox.execution import Limits

ROLES = ("reward", "environment")
"""Roles that run code."""


def try_fences(fleet: Fleet, all_limits: Sequence[Limits]) -> list[str]:
    """Try the sandbox. Returns a line for all nodes on which the same holds. Raises `SandboxUnavailable` naming a node,
    `DeadlineExceeded`."""
    timeout_s = fleet.config.rollout.start_timeout_s
    facts, members = fleet.agents.facts(timeout_s), fleet.agents.members
    homes = [fleet.node_of(name) for role in ROLES for name, _ in fleet.role(role)]
    nodes = [node for node in dict.fromkeys(homes) if node in members]
    calls = [(members[node][0], members[node][1].try_fences.remote(all_limits)) for node in nodes]
    hosts: dict[str, list[str]] = {}
    for node, held in zip(nodes, get_all(calls, phase="trying the sandbox", timeout_s=timeout_s), strict=True):
        hosts.setdefault(held, []).append(facts[node].host)
    return [f"sandbox on {', '.join(names)}: {held}" for held, names in hosts.items()]
