"""A reward model from pairs of responses.

    source ─▶ pair_responses ─ response_ids, preferred ─▶ train (scores)

The trained model has a scalar head, and is written as a HF sequence classification model; `algorithm=ppo` reads it
as `model.paths.reward_model`.
"""

from functools import partial

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.preference.bradley_terry import bradley_terry_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms.ppo import RewardModelConfig


@algorithm("reward_model")
def reward_model(cfg: RewardModelConfig) -> Dataflow:
    """Bradley-Terry on a dataset of pairs: 2203.02155 eq. 1."""
    loss = partial(bradley_terry_loss, centering_coef=cfg.centering_coef)
    return Dataflow().preferences().train("reward_model", loss=loss)
