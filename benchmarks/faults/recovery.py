"""Seconds from the death of each member to the next step of the run, also of the command itself: another goes on with
its actors, or, where they have ended with it, resumes everything from the checkpoint."""

import statistics
from typing import Any

from benchmarks.faults.runs import Finished, Runs
from benchmarks.harness import Target, new_table, show
from tests.chaos.checker import answers_of
from tests.chaos.plan import COMMAND, KILL, Fault
from tests.chaos.plan import Target as Victim

NUM_ROUNDS = 3
MEMBERS = ("Reward-0", "Prompts", "Rollout-0", "Trainer-policy-0", COMMAND)
EVERYBODY = "the command and all actors"
BETWEEN = 3
"""Steps from one death to the next."""
DELAY_S = 0.5
"""After a step was logged."""
WORDS = [
    "recipe=arithmetic",
    "warm_start.recipe=null",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=1",
    "tracking.export_model=false",
]
SHARE = 1 / 3


def measure(runs: Runs, quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    faults = [Fault(Victim(who, KILL), BETWEEN * number, DELAY_S) for number, who in enumerate(MEMBERS, 1)]
    words = [*WORDS, f"trainer.max_steps={BETWEEN * (len(MEMBERS) + 1)}"]
    alone = [*WORDS, f"trainer.max_steps={2 * BETWEEN}", "faults.lease_s=0"]
    rounds = []
    for number in range(num_rounds or (1 if quick else NUM_ROUNDS)):
        rounds += _of_run(number, runs.run(words, faults, retries=1))
        (whole,) = _of_run(number, runs.run(alone, [Fault(Victim(COMMAND, KILL), BETWEEN, DELAY_S)], retries=1))
        rounds.append(whole | {"who": EVERYBODY})
    return rounds


def _of_run(number: int, run: Finished) -> list[dict[str, Any]]:
    usual_s = statistics.median(line["timing_s/step"] for line in run.metrics)
    released = {line["step"]: line.get("store/batches_released", 0.0) for line in run.metrics}
    ends = [*(done.step for done in run.done[1:]), run.metrics[-1]["step"]]
    return [
        {
            "round": number, "who": answer.done.who, "noticed_s": answer.noticed_after_s, "outcome": answer.outcome,
            "serves_s": answer.seconds, "next_step_s": run.next_step_after(answer.done.at), "step_s": usual_s,
            "steps_again": released[end] - released[answer.done.step],
        }
        for answer, end in zip(answers_of(run.directory, run.done), ends, strict=True)
    ]  # fmt: skip


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    columns = ["noticed after", "serves again after", "next step after"]
    table = new_table(f"Seconds after a SIGKILL; a step takes {_median(rounds, '', 'step_s'):.1f}", ["who"], columns)
    for who in (*MEMBERS, EVERYBODY):
        table.add_row(who, *(f"{_median(rounds, who, key):.1f}" for key in ("noticed_s", "serves_s", "next_step_s")))
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    trainer, command, whole = (_median(rounds, who, "next_step_s") for who in ("Trainer-policy-0", COMMAND, EVERYBODY))
    again = max(entry["steps_again"] for entry in rounds if entry["who"] in ("Trainer-policy-0", COMMAND))
    return [
        Target("a trainer rank's death, of a whole resume", trainer / whole, "x", "<=", SHARE),
        Target("the command's death, of a whole resume", command / whole, "x", "<=", SHARE),
        Target("steps of work that one of them costs at most", again, "", "<=", 1),
    ]


def _median(rounds: list[dict[str, Any]], who: str, key: str) -> float:
    """Of a member, or of all."""
    return float(statistics.median(entry[key] or 0.0 for entry in rounds if not who or entry["who"] == who))
