"""What one rank's update knows of each sampled token, as it is sent to the controller: without torch. Made by
`update/token_recorder.py`, where its meaning is told; written by `orchestrator/reporting/sample_log.py`.

Legend: N rows of this rank, T_i sampled tokens of row i.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenValues:
    """Of one step. Too large for each step's report: it is asked for where samples are written."""

    row_ids: np.ndarray
    """`[N]` int64."""
    trainer_logprobs: list[np.ndarray | None]
    """`[T_i]` float32, NaN for a token of an old turn. None: the row came after an optimizer step of its own update,
    and the loss asked for no log-probabilities of before."""
    loss_mask: list[np.ndarray]
    """`[T_i]` bool."""
