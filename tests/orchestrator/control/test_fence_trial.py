"""The nodes on which the fences for code of models are tried, and what people are told of them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import SandboxUnavailable
from penstock.orchestrator.control.lifecycle import try_fences
from penstock.workers.sandbox.execution import Limits
from tests.fakes.actors import FakeHandle

HOMES = {"Trainer-policy-0": "n1", "Reward-0": "n2", "Reward-1": "n3", "Reward-2": "n2", "Environment-0": "n4"}
"""Node by actor. That of Environment-0 has left."""


class PlayedFleet:
    """Agents on three nodes; every call is noted. `held`: what an agent says, by node, or raises."""

    def __init__(self, held: dict[str, str | Exception]) -> None:
        self.asked: list[tuple[str, list[Limits]]] = []
        self.config = SimpleNamespace(rollout=SimpleNamespace(start_timeout_s=5.0))
        facts = {node: SimpleNamespace(host=f"host-{node}") for node in held}
        members = {
            node: (f"Agent-{node}", FakeHandle(try_fences=partial(self._try, node, held[node]))) for node in held
        }
        self.agents = SimpleNamespace(members=members, facts=lambda timeout_s: facts)
        self.node_of = HOMES.get

    def _try(self, node: str, held: str | Exception, all_limits: list[Limits]) -> str | Exception:
        self.asked.append((node, all_limits))
        return held

    def role(self, role: str) -> list[tuple[str, Any]]:
        return [(name, None) for name in HOMES if name.lower().startswith(role)]


def try_on(held: dict[str, str | Exception]) -> tuple[list[str], list[tuple[str, list[Limits]]]]:
    fleet: Any = PlayedFleet(held)
    return try_fences(fleet, [Limits(cpu_s=2)]), fleet.asked


def test_each_node_that_code_runs_on_is_asked_once_and_no_other() -> None:
    told, asked = try_on({"n1": "unasked", "n2": "a control group", "n3": "none"})
    assert asked == [("n2", [Limits(cpu_s=2)]), ("n3", [Limits(cpu_s=2)])]
    assert told == ["sandbox on host-n2: a control group", "sandbox on host-n3: none"]


def test_nodes_on_which_the_same_holds_are_told_together() -> None:
    told, _ = try_on({"n1": "unasked", "n2": "a control group", "n3": "a control group"})
    assert told == ["sandbox on host-n2, host-n3: a control group"]


def test_a_node_without_a_fence_ends_the_start() -> None:
    with pytest.raises(SandboxUnavailable, match="host-n3: there is no bwrap"):
        try_on({"n1": "unasked", "n2": "a control group", "n3": SandboxUnavailable("host-n3: there is no bwrap")})
