"""What engines count becomes metrics of a step."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from penstock.orchestrator.observability.reporting.step_log import Usage
from penstock.workers.rollout.rollout_worker import PAUSED, READ_AGAIN


def test_a_step_says_how_long_engines_stood_still_and_what_they_read_twice() -> None:
    """Of the mean engine, and of all; since the last step. An engine that is new begins at 0."""
    counts = {"Rollout-0": {PAUSED: 1.0, READ_AGAIN: 100.0}, "Rollout-1": {PAUSED: 2.0, READ_AGAIN: 50.0}}

    async def ask(members: Sequence[tuple[str, Any]], *_: Any, **__: Any) -> list[dict[str, float]]:
        return [counts[name] for name, _ in members]

    fleet = SimpleNamespace(
        role=lambda role: [(name, None) for name in counts] if role == "rollout" else [],
        teams=lambda role: [[name] for name in counts], roll_call=SimpleNamespace(ask=ask),
    )  # fmt: skip
    usage = Usage(fleet, SimpleNamespace(of_kind=lambda kind: [kind]))  # type: ignore[arg-type]

    async def scenario() -> list[dict[str, float]]:
        found = [(await usage.since_last(1.0)).updates]
        counts.update({"Rollout-0": {PAUSED: 1.5, READ_AGAIN: 300.0}, "Rollout-1": {PAUSED: 0.1, READ_AGAIN: 10.0}})
        return [*found, (await usage.since_last(1.0)).updates]

    first, second = asyncio.run(scenario())
    assert first == {"rollout/paused_s": 1.5, "rollout/prefilled_again": 150.0}
    assert second == {"rollout/paused_s": (0.5 + 0.1) / 2, "rollout/prefilled_again": 200.0 + 10.0}
