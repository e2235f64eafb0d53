"""Conversion of a dataset's pair of responses to two samples of one group: the first stage of `Dataflow.preferences`.

Imports no torch, since the graph of a dataflow is built without it.

Legend: G samples of one group, two here; T_i tokens of a response.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pair_responses(chosen_ids: Sequence[T], rejected_ids: Sequence[T]) -> tuple[list[T], list[float]]:
    """Make the chosen response sample 0, the rejected one sample 1: `response_ids`, two `[T_i]`, and `preferred` `[G]`,
    +1 and -1. Each of the arguments has the same tokens G times, since the source writes them for the group."""
    return [chosen_ids[0], rejected_ids[0]], [1.0, -1.0]
