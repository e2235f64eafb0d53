"""Who was busy how long since the last step: counters of all workers, asked once a step, as differences."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.ray_calls import answers

PHASES = {"rollout": "rollout", "reward": "reward", "scorer": "reference", "compute": "compute"}
"""What the seconds of each role that computes count for. The prompts' counters are asked for as well, for what they
leave out."""


@dataclass
class StepUsage:
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, averaged over its workers."""
    generated_length_mean: float | None = None
    """Tokens a response, over all responses finished since the last step."""
    dropped: dict[str, float] = field(default_factory=dict)
    """`dropped/<reason>` before the store: rows of the dataset, cumulative."""
    groups: dict[str, float] = field(default_factory=dict)
    """`rollout/groups/<engine>` and `rollout/groups_spread`, since the process began."""


class Usage:
    """Remembers the last counters. `since_last` is called once a step."""

    def __init__(self, fleet: Fleet, flow: Dataflow) -> None:
        # Engines and rewards may be there for evaluation alone.
        roles = [role for role in PHASES if role not in ("rollout", "reward") or flow.of_kind(role)]
        self._workers = [(role, name, handle) for role in roles for name, handle in fleet.role(role)]
        self._prompts = fleet.role("prompts")
        self._last: dict[str, dict[str, float]] = defaultdict(dict)

    async def since_last(self, timeout_s: float) -> StepUsage:
        """Seconds and lengths since the previous call. Each worker's `stats()` has busy_s; a rollout's also tokens,
        samples."""
        members = [*((name, handle) for _, name, handle in self._workers), *self._prompts]
        calls: list[tuple[str, Any]] = [(name, handle.stats.remote()) for name, handle in members]
        counters = await answers(calls, phase="collect metrics", timeout_s=timeout_s)
        sources = counters[len(self._workers) :]
        dropped = {key: value for source in sources for key, value in source.items() if key.startswith("dropped/")}
        seconds: dict[str, list[float]] = defaultdict(list)
        tokens = samples = 0.0
        for (role, name, _), now in zip(self._workers, counters[: len(self._workers)], strict=True):
            gained = {
                key: value - self._last[name].get(key, 0.0)
                for key, value in now.items()
                if isinstance(value, int | float)
            }
            self._last[name] = now
            seconds[PHASES[role]].append(gained.get("busy_s", 0.0))
            tokens += gained.get("tokens", 0.0)
            samples += gained.get("samples", 0.0)
        means = {phase: sum(values) / len(values) for phase, values in seconds.items()}
        groups = {
            name: now["groups"]
            for (role, name, _), now in zip(self._workers, counters, strict=False)
            if role == "rollout" and "groups" in now
        }
        return StepUsage(means, tokens / samples if samples else None, dropped, group_metrics(groups))


def group_metrics(groups: Mapping[str, float]) -> dict[str, float]:
    """Groups sampled by each engine, and how unevenly: the busiest one's over the laziest one's.

    >>> group_metrics({"Rollout-0": 6.0, "Rollout-1": 4.0})
    {'rollout/groups/Rollout-0': 6.0, 'rollout/groups/Rollout-1': 4.0, 'rollout/groups_spread': 1.5}
    """
    metrics = {f"rollout/groups/{name}": count for name, count in groups.items()}
    if len(groups) > 1:
        metrics["rollout/groups_spread"] = max(groups.values()) / max(1.0, min(groups.values()))
    return metrics
