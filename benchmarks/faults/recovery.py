"""Costs of the death of each role of a run: seconds to the next step, also where the command itself dies and another
goes on with its actors, or, where they have ended with it, resumes everything from the checkpoint. And of all of them
the share of time that is left for training at a fault a minute.

One run has every role struck once, and one engine, so that no other works on meanwhile. A step without faults
is that of another run of the same round, before its command is ended. What a fault costs is the time by which the run
with faults took longer than so many such steps, over its faults.
"""

import statistics
from typing import Any

from benchmarks.faults.runs import Finished, Runs
from benchmarks.harness import Target, new_table, show, spread
from tests.chaos.checker import answers_of
from tests.chaos.plan import COMMAND, KILL, Fault
from tests.chaos.plan import Target as Victim

NUM_ROUNDS = 3
AGENT = "Agent"
MEMBERS = (
    "Reward-0", "Prompts", "Compute-group_advantage", "Scorer-reference-0", "Rollout-0", "Trainer-policy-0", "Store",
    AGENT, COMMAND,
)  # fmt: skip
EVERYBODY = "the command and all actors"
BETWEEN = 2
"""Number of steps from one death to the next."""
SETTLED, UNDISTURBED = 2, 9
"""Steps without faults are timed from the first to the second."""
DELAY_S = 0.5
"""Seconds after a step was logged."""
WORDS = [
    "recipe=arithmetic",
    "warm_start.recipe=null",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=1",
    "tracking.export_model=false",
    "algorithm.kl_coef=0.05",
]
"""Settings with a reference model, so that there is a scorer."""
SHARE = 1 / 3
MINUTE_S = 60.0
EFFECTIVE = 0.9


def measure(runs: Runs, quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    faults = [Fault(Victim(who, KILL), BETWEEN * number, DELAY_S) for number, who in enumerate(MEMBERS, 1)]
    words = [*WORDS, f"trainer.max_steps={BETWEEN * (len(MEMBERS) + 1)}"]
    alone = [*WORDS, f"trainer.max_steps={UNDISTURBED + BETWEEN}", "faults.lease_s=0"]
    rounds = []
    for number in range(num_rounds or (1 if quick else NUM_ROUNDS)):
        disturbed = runs.run(words, faults, retries=1)
        resumed = runs.run(alone, [Fault(Victim(COMMAND, KILL), UNDISTURBED, DELAY_S)], retries=1)
        (whole,) = _of_run(number, resumed)
        step_s = seconds_a_step(resumed.steps, SETTLED, UNDISTURBED)
        lost = {"lost_s": lost_s(disturbed.steps, step_s), "faults": len(disturbed.done), "undisturbed_s": step_s}
        rounds += [one | lost for one in _of_run(number, disturbed)]
        rounds.append(whole | {"who": EVERYBODY})
    return rounds


def seconds_a_step(steps: list[tuple[float, int]], first: int, last: int) -> float:
    """Seconds a step, from one step to another, when each was logged for the first time."""
    at = {step: when for when, step in reversed(steps)}
    return (at[last] - at[first]) / (last - first)


def lost_s(steps: list[tuple[float, int]], step_s: float) -> float:
    """Seconds by which the run took longer, from its first step to its last, than so many steps without faults."""
    (begin, first), (end, last) = steps[0], steps[-1]
    return end - begin - (last - first) * step_s


def effective(entry: dict[str, Any]) -> float:
    """Share of time that trains where faults like those of the round come once a minute."""
    return MINUTE_S / (MINUTE_S + entry["lost_s"] / entry["faults"])


def of_runs(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of each run with faults, one of each."""
    return [entry for entry in rounds if entry["who"] == MEMBERS[0]]


def _of_run(number: int, run: Finished) -> list[dict[str, Any]]:
    usual_s = statistics.median(line["timing_s/step"] for line in run.metrics)
    released = {line["step"]: line.get("store/batches_released", 0.0) for line in run.metrics}
    ends = [*(done.step for done in run.done[1:]), run.metrics[-1]["step"]]
    return [
        {
            "round": number, "who": _role(answer.done.who), "noticed_s": answer.noticed_after_s,
            "outcome": answer.outcome, "serves_s": answer.seconds,
            "next_step_s": run.next_step_after(answer.done.at), "step_s": usual_s,
            "steps_again": released[end] - released[answer.done.step],
        }
        for answer, end in zip(answers_of(run.directory, run.done), ends, strict=True)
    ]  # fmt: skip


def _role(who: str) -> str:
    """Role of a member. An agent's name is its node's."""
    return AGENT if who.startswith(f"{AGENT}-") else who


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    usual = spread([entry["step_s"] for entry in of_runs(rounds)], 1)
    table = new_table(
        f"Seconds after a SIGKILL, medians (lowest-highest); a step takes {usual}",
        ["who"],
        ["noticed after", "serves again after", "next step after"],
    )
    for who in (*MEMBERS, EVERYBODY):
        table.add_row(who, *(spread(_of(rounds, who, key), 1) for key in ("noticed_s", "serves_s", "next_step_s")))
    show(table, 120)
    runs = of_runs(rounds)
    table = new_table(
        f"A run of one engine, each of its {len(MEMBERS)} roles struck once",
        [],
        ["a step without faults, s", "lost in all, s", "a fault, s", "effective at a fault a minute"],
    )
    table.add_row(
        spread([entry["undisturbed_s"] for entry in runs], 2), spread([entry["lost_s"] for entry in runs]),
        spread([entry["lost_s"] / entry["faults"] for entry in runs], 1), spread([effective(one) for one in runs], 2),
    )  # fmt: skip
    show(table, 120)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    trainer, command, whole = (
        statistics.median(_of(rounds, who, "next_step_s")) for who in ("Trainer-policy-0", COMMAND, EVERYBODY)
    )
    again = max(entry["steps_again"] for entry in rounds if entry["who"] in ("Trainer-policy-0", COMMAND))
    share = statistics.median(effective(entry) for entry in of_runs(rounds))
    return [
        Target("a trainer rank's death, of a whole resume", trainer / whole, "x", "<=", SHARE),
        Target("the command's death, of a whole resume", command / whole, "x", "<=", SHARE),
        Target("steps of work that one of them costs at most", again, "", "<=", 1),
        Target("effective training time at a fault a minute", share, "", ">=", EFFECTIVE),
    ]


def _of(rounds: list[dict[str, Any]], who: str, key: str) -> list[float]:
    """Values of each round."""
    return [entry[key] or 0.0 for entry in rounds if entry["who"] == who]
