"""From a dataset's pair of responses to two samples of one group. The first stage of `Dataflow.preferences`.

Legend: G samples of one group, two here; T_i tokens of a response.
"""

from torch import Tensor, tensor


def pair_responses(chosen_ids: list[Tensor], rejected_ids: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The chosen response is sample 0, the rejected one sample 1: `response_ids`, two `[T_i]`, and `preferred` `[G]`,
    +1 and -1. Each of the lists has the same tokens G times, since the source writes them for the group."""
    return [chosen_ids[0], rejected_ids[0]], tensor([1.0, -1.0])
