"""Segments of turns: linear sequences of tokens, in each of which a turn continues where the last one ended. Pure.

    turn 0: prompt P,            sampled A      ┐ segment 0:  P A Q B, of which A and B are trained
    turn 1: prompt P A Q,        sampled B      ┘
    turn 2: prompt P' (rewritten), sampled C      segment 1:  P' C

A turn goes on with a segment if its prompt begins with all tokens of it; that is decided on tokens alone, without the
messages. Every sampled token is trained in one segment, its turn's: where a later segment begins with it, it is context
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.workers.trajectory.turn import Turn


@dataclass
class Run:
    """Tokens that were read, and those that one turn sampled after them."""

    context: Sequence[int]
    turn: Turn


@dataclass
class Segment:
    """Runs that follow each other."""

    runs: list[Run] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of all runs."""

    def goes_on(self, turn: Turn) -> bool:
        """Return whether the turn has read all of the segment, and maybe more."""
        return len(self.tokens) <= len(turn.prompt_ids) and list(turn.prompt_ids[: len(self.tokens)]) == self.tokens

    def append(self, turn: Turn) -> None:
        self.runs.append(Run(turn.prompt_ids[len(self.tokens) :], turn))
        self.tokens = [*turn.prompt_ids, *turn.output_ids]


def segments_of(turns: Sequence[Turn]) -> list[Segment]:
    """Make segments of turns, which are in the order of their ids. A turn that two segments begin with belongs to the
    first."""
    segments: list[Segment] = []
    for turn in turns:
        going_on = [segment for segment in segments if segment.goes_on(turn)]
        if going_on:
            max(going_on, key=lambda segment: len(segment.tokens)).append(turn)
        else:
            segments.append(Segment())
            segments[-1].append(turn)
    return segments


def spans_of(segments: Sequence[Segment]) -> list[int]:
    """The column `spans`: segment, context tokens and sampled tokens of each run, one after the other."""
    return [
        number
        for index, segment in enumerate(segments)
        for run in segment.runs
        for number in (index, len(run.context), len(run.turn.output_ids))
    ]
