"""Faults of a run and their moments, drawn from a seed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

KILL, STOP, CUT, POWER, FENCE = "kill", "stop", "cut", "power", "fence"
"""SIGKILL to a process; SIGSTOP, so that it is there and does not answer; a machine's cable out for seconds; a machine
that is gone without a word; SIGKILL to one of a member's fences."""
COMMAND = "the command"
"""`penstock run` itself, as a target."""
SEEDS = range(
    first := int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")), first + int(os.environ.get("PENSTOCK_CHAOS", "1"))
)
"""Seeds of the runs of each file."""
IS_CHAOS = "PENSTOCK_CHAOS" in os.environ
"""`make chaos`, which has the machine for itself: only there a bound on seconds means something."""
NET_S = 900.0
CUT_S = 5.0
LONGEST_DELAY_S = 0.6


@dataclass(frozen=True)
class Target:
    """`who`: a member's name, `Agent`, `Store`, the command or a machine's number. `how`: one of the above."""

    who: str
    how: str


@dataclass(frozen=True)
class Fault:
    """Done `delay_s` after the run has made so many steps, and has written the file `after`, if one is named."""

    target: Target
    step: int
    delay_s: float
    after: str = ""
    """A file in the run's directory."""


def draw(seed: int, targets: Sequence[Target], num_steps: int, last: Sequence[Target] = ()) -> list[Fault]:
    """One fault for each target, in any order, at any moment of a run. `last`: those that come after all others.

    No fault waits for the one before to be over, so some meet a run that is still busy with it.
    """
    dice = Random(seed)
    order = [*dice.sample(list(targets), len(targets)), *last]
    steps = sorted(dice.randrange(1, num_steps) for _ in order)
    return [Fault(target, step, dice.uniform(0.0, LONGEST_DELAY_S)) for target, step in zip(order, steps, strict=True)]
