"""The values of each sampled token in one rank's update, as they are sent to the controller: without torch.
`update/token_recorder.py` makes them and says what they mean.

Legend: N rows of this rank, T_i sampled tokens of row i.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenValues:
    """Token values of one step. Too large for each step's report: they are asked for where samples are written."""

    row_ids: np.ndarray
    """Ids of the rows, `[N]` int64."""
    trainer_logprobs: list[np.ndarray | None]
    """Log-probabilities, `[T_i]` float32, NaN for a token of an old turn. None: the row came after an optimizer step of
    its own update, and the loss asked for no log-probabilities of before."""
    loss_mask: list[np.ndarray]
    """Loss masks, `[T_i]` bool."""
