"""Who waits for whom."""

from typing import Any

from penstock.orchestrator.observability.state_log import MOST_AWAITED, StageView, Wait, awaited, waits_of

STAGES = [
    StageView("source", (), ("prompt_ids", "task"), ("Prompts",)),
    StageView("rollout", ("prompt_ids",), ("response_ids", "response_text"), ("Rollout-0", "Rollout-1")),
    StageView("reward", ("task", "response_text"), ("reward",), ("Reward-0",)),
    StageView("train", ("prompt_ids", "response_ids", "reward"), (), ("Trainer-policy-0",)),
]


def described(
    waiting: dict[str, int], waiters: dict[str, list[str]], leases: list[tuple[str, str, int]], free: dict[str, int]
) -> dict[str, Any]:
    return {
        "waiting": waiting,
        "waiters": waiters,
        "leases": [{"stage": stage, "owner": owner, "open_rows": rows} for stage, owner, rows in leases],
        "rows": {name: {"free": count} for name, count in free.items()},
        "credits": {"active": 32, "max": 32, "served": 4},
    }


def test_who_lacks_rows_waits_for_those_that_have_them_under_way() -> None:
    told = described({"reward": 1, "train": 1}, {"reward": ["Reward-0"]}, [("rollout", "Rollout-1", 24)], {})
    assert waits_of(told, STAGES) == [
        Wait("Reward-0", "Rollout-1", "24 row(s) of rollout"),
        Wait("Trainer-policy-0", "Rollout-1", "24 row(s) of rollout"),
    ]


def test_who_holds_rows_and_asks_for_more_does_not_wait() -> None:
    told = described({"rollout": 1}, {"rollout": ["Rollout-0"]}, [("rollout", "Rollout-0", 24)], {})
    assert waits_of(told, STAGES) == []


def test_rows_that_nobody_has_taken_are_waited_for_where_they_are_free() -> None:
    told = described({"train": 1}, {"train": []}, [], {"reward": 8})
    assert waits_of(told, STAGES) == [Wait("Trainer-policy-0", "Reward-0", "8 row(s) that reward has not taken")]


def test_with_nothing_under_way_engines_wait_on_prompts_and_those_on_ranks() -> None:
    told = described({"rollout": 2, "put": 1}, {"rollout": ["Rollout-0", "Rollout-1"]}, [], {})
    assert waits_of(told, STAGES) == [
        Wait("Rollout-0", "Prompts", "a prompt"),
        Wait("Rollout-1", "Prompts", "a prompt"),
        Wait("Prompts", "Trainer-policy-0", "version 5 (32 of 32 groups are under way)"),
    ]


def test_who_does_nothing_waits_for_the_stages_before_its_own() -> None:
    assert awaited(STAGES) == {
        "Rollout-0": "prompts",
        "Rollout-1": "prompts",
        "Reward-0": "rollout",
        "Trainer-policy-0": "rollout and reward",
    }


def test_ranks_that_wait_for_very_many_are_told_those_that_have_held_longest() -> None:
    told = described({"train": 1}, {"train": []}, [("rollout", f"Rollout-{n}", 4) for n in range(100)], {})
    for number, lease in enumerate(told["leases"]):
        lease["held_s"] = float(number)
    waits = waits_of(told, STAGES)
    assert [wait.on for wait in waits] == [f"Rollout-{n}" for n in range(99, 99 - MOST_AWAITED, -1)]
