"""What engines count becomes metrics of a step."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from penstock.orchestrator.observability.reporting.step_log import Usage
from penstock.workers.rollout.rollout_worker import ACCEPTED, DRAFTED, PAUSED, READ_AGAIN


def updates_of(*steps: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    """What is said of each step by these counts of engines after it."""
    counts: dict[str, dict[str, float]] = {}

    async def ask(members: Sequence[tuple[str, Any]], *_: Any, **__: Any) -> list[dict[str, float]]:
        return [counts[name] for name, _ in members]

    fleet = SimpleNamespace(
        role=lambda role: [(name, None) for name in counts] if role == "rollout" else [],
        teams=lambda role: [[name] for name in counts], roll_call=SimpleNamespace(ask=ask),
    )  # fmt: skip
    usage = Usage(fleet, SimpleNamespace(of_kind=lambda kind: [kind]))  # type: ignore[arg-type]

    async def scenario() -> list[dict[str, float]]:
        found = []
        for step in steps:
            counts.update(step)
            found.append((await usage.since_last(1.0)).updates)
        return found

    return asyncio.run(scenario())


def test_a_step_says_how_long_engines_stood_still_and_what_they_read_twice() -> None:
    """Of the mean engine, and of all; since the last step. An engine that is new begins at 0."""
    first, second = updates_of(
        {"Rollout-0": {PAUSED: 1.0, READ_AGAIN: 100.0}, "Rollout-1": {PAUSED: 2.0, READ_AGAIN: 50.0}},
        {"Rollout-0": {PAUSED: 1.5, READ_AGAIN: 300.0}, "Rollout-1": {PAUSED: 0.1, READ_AGAIN: 10.0}},
    )
    assert first == {"rollout/paused_s": 1.5, "rollout/prefilled_again": 150.0}
    assert second == {"rollout/paused_s": (0.5 + 0.1) / 2, "rollout/prefilled_again": 200.0 + 10.0}


def test_a_step_says_which_share_of_all_drafted_tokens_was_accepted() -> None:
    """An engine that has begun again without drafts says nothing more of them."""
    found = updates_of(
        {"Rollout-0": {DRAFTED: 100.0, ACCEPTED: 30.0}, "Rollout-1": {DRAFTED: 300.0, ACCEPTED: 30.0}},
        {"Rollout-0": {DRAFTED: 150.0, ACCEPTED: 55.0}},
        {},
    )
    assert found == [{"rollout/speculation_acceptance": share} for share in (0.15, 0.5)] + [{}]
