"""The share of time that trains, at a fault a minute: a run with two engines through deaths of its members in turn,
beside the same run without any."""

import statistics
from typing import Any

from benchmarks.faults.runs import Finished, Runs
from benchmarks.harness import Target, new_table, show
from tests.chaos.plan import KILL, Fault
from tests.chaos.plan import Target as Victim

MEMBERS = ("Reward-0", "Rollout-0", "Prompts", "Trainer-policy-0", "Compute-group_advantage")
EVERY_S = 60.0
STEPS = 100
WORDS = ["recipe=arithmetic", "warm_start.recipe=null", "checkpoint.every_steps=10", "rollout.num_workers=2"]
SHARE = 0.9


def measure(runs: Runs, quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    """A round is some minutes."""
    every_s, steps = (15.0, 30) if quick else (EVERY_S, STEPS)
    words = [*WORDS, f"trainer.max_steps={steps}"]
    rounds = []
    for number in range(num_rounds or 1):
        whole = _seconds(runs.run(words))
        # As many as fall into the time of a whole run; later ones would hit a run that may have ended.
        faults = [
            Fault(Victim(MEMBERS[count % len(MEMBERS)], KILL), 1, every_s) for count in range(int(whole // every_s))
        ]
        disturbed = runs.run(words, faults)
        rounds.append(
            {
                "round": number, "steps": steps, "faults": len(faults), "whole_s": whole,
                "disturbed_s": _seconds(disturbed), "said": disturbed.metrics[-1].get("faults/effective_time"),
            }
        )  # fmt: skip
    return rounds


def _seconds(run: Finished) -> float:
    """From the first step to the end."""
    return run.ended_at - run.steps[0][0]


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("A fault a minute", [], ["steps", "faults", "without faults, s", "with them, s", "effective"])
    for entry in rounds:
        table.add_row(
            f"{entry['steps']}", f"{entry['faults']}", f"{entry['whole_s']:.0f}", f"{entry['disturbed_s']:.0f}",
            f"{entry['whole_s'] / entry['disturbed_s']:.2f}",
        )  # fmt: skip
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    share = statistics.median(entry["whole_s"] / entry["disturbed_s"] for entry in rounds)
    return [Target("effective training time at a fault a minute", share, "", ">=", SHARE)]
