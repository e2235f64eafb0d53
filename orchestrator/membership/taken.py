"""The point at which a command has left off whose actors live on: what its successor does first. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.trainer.report import StepReport


@dataclass(frozen=True)
class Taken:
    """The point after step `step`, the last that was trained."""

    step: int
    unwritten: dict[int, Sequence[StepReport]]
    """Ranks' reports of steps up to that one whose metrics are not written yet, by step. What comes after the update is
    done again for the last step; the weights of those before, engines have had or need no more."""
    metrics: dict[str, Any]
    """The line of that step, if it is written."""

    @classmethod
    def of(cls, step: int, made: Mapping[int, Sequence[StepReport]], lines: Sequence[dict[str, Any]]) -> "Taken":
        """The point after `step`. `made`: reports of steps that were made, perhaps for nothing. `lines`:
        metrics.jsonl."""
        written = {int(line.get("step", 0)): line for line in lines}
        unwritten = {number: reports for number, reports in made.items() if number <= step and number not in written}
        return cls(step, unwritten, written.get(step, {}))
