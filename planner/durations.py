"""What the simulator and the closed form ask of a cost model: seconds of each thing that a run does, for one plan.

    an engine   prefill, then one decode step after another of all sequences that it has
    a rank      the update of its share of a batch
    weights     published while engines generate on, loaded while an engine pauses
    others      rewards and scorers, by their stage

Seconds come from kernels' times (`costs/`), or from what a run has recorded (`calibration.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sync:
    """Seconds of one weight sync."""

    published_s: float
    """From the end of the update until the version is sealed. A synchronous run waits for it."""
    paused_s: float
    """Pause of an engine, which loads the version."""
    critical_s: float = 0.0
    """The part of `published_s` that the next step waits for, where `max_staleness` is above 0."""


class Durations(Protocol):
    """Seconds of one plan's actors. Each is of one engine or one rank: a tensor-parallel engine is one."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which an engine reads so many tokens of prompts, and decodes nothing."""
        ...

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of one decode step: one token of each sequence. `context`: mean number of tokens before it."""
        ...

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        """Seconds of an update by all ranks, its optimizer steps included. `lengths`: tokens, prompt included, of each
        rank's rows; the slowest rank decides."""
        ...

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        """Seconds that one actor of another stage takes for rows with so many tokens in all."""
        ...

    def sync(self) -> Sync:
        """Seconds of a weight sync."""
        ...

    def turn_s(self) -> float:
        """Seconds that a change of turns takes where engines and ranks share their devices; 0 where they do not."""
        ...
