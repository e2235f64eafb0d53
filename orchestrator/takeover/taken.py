"""Where a command has left off whose actors live on: what its successor does first. Pure. Made by `training.py`, for
the controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.trainer.report import StepReport


@dataclass(frozen=True)
class Taken:
    """After step `step`, the last that was trained."""

    step: int
    unwritten: dict[int, Sequence[StepReport]]
    """Steps up to that one whose numbers are not written yet, and the ranks' reports of them. What comes after the
    update is done again for the last one; of those before, engines have had the weights, or need them no more."""
    metrics: dict[str, Any]
    """What is written of that step."""

    @classmethod
    def of(cls, step: int, made: Mapping[int, Sequence[StepReport]], lines: Sequence[dict[str, Any]]) -> "Taken":
        """`made`: reports of steps that were made, perhaps for nothing. `lines`: of metrics.jsonl."""
        written = {int(line.get("step", 0)): line for line in lines}
        unwritten = {number: reports for number, reports in made.items() if number <= step and number not in written}
        return cls(step, unwritten, written.get(step, {}))
