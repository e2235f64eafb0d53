"""Preferences, of a dataset or on the policy's own samples: learning from pairs, or from single responses, good or bad.

    dpo         source ─▶ pair_responses ─ response_ids, preferred ─▶ train
                                └─▶ reference ────────────────────────┘
    online_dpo  source ─▶ rollout ─▶ reward ─▶ best_and_worst ─ preferred ─▶ train
                             └─▶ reference ──────────────────────────────────┘
    kto         source ─ response_ids ─▶ reward ─▶ good_or_bad ─ desirable ─▶ train
                             └─▶ reference ──────────────────────────────────┘
    online_kto  the same with a rollout before the reward
    reward_model  source ─▶ pair_responses ─ response_ids, preferred ─▶ train (scores)

The losses get `group_ids`, so the trainer keeps each group in one micro-batch, and the store keeps it on one rank. A
trained reward model has a scalar head, and is written as a HF sequence classification model; `algorithm=ppo` reads it
as `model.paths.reward_model`.

Legend: G samples of one group (the same prompt).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.advantages import finite_rewards
from penstock.algorithms.checks import non_negative
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import (
    DpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    OnlineKtoConfig,
    RewardModelConfig,
)


@algorithm("dpo")
def dpo(cfg: DpoConfig) -> Dataflow:
    """Direct preference optimisation on a dataset of pairs: 2305.18290."""
    return _train_on_pairs(Dataflow().preferences(), cfg)


@algorithm("online_dpo")
def online_dpo(cfg: OnlineDpoConfig) -> Dataflow:
    """The best of a group against its worst, sampled by the policy itself: 2402.04792."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    select = partial(best_and_worst, min_gap=cfg.min_gap)
    flow.compute(select, per="group", reads=["reward"], writes=["preferred"])
    return _train_on_pairs(flow, cfg)


def _train_on_pairs(flow: Dataflow, cfg: DpoConfig) -> Dataflow:
    losses: dict[str, Any] = {
        "dpo": partial(dpo_loss, beta=cfg.beta, label_smoothing=cfg.label_smoothing),
        "ipo": partial(ipo_loss, beta=cfg.beta),
        "simpo": partial(simpo_loss, beta=cfg.beta, target_margin=cfg.target_margin),
        "orpo": partial(orpo_loss, odds_ratio_coef=cfg.beta),
    }
    if cfg.loss in ("dpo", "ipo"):
        flow.logprobs("reference")
    return flow.train("policy", loss=losses[cfg.loss])


@algorithm("kto")
def kto(cfg: KtoConfig) -> Dataflow:
    """Single responses of a dataset, of which a reward says whether they are good: 2402.01306."""
    return _train_on_judgements(Dataflow().demonstrations(), cfg)


@algorithm("online_kto")
def online_kto(cfg: OnlineKtoConfig) -> Dataflow:
    """KTO on the policy's own samples."""
    return _train_on_judgements(Dataflow().rollout("policy", samples_per_prompt=cfg.group_size), cfg)


def _train_on_judgements(flow: Dataflow, cfg: KtoConfig) -> Dataflow:
    flow.reward()
    flow.compute(partial(good_or_bad, threshold=cfg.threshold), per="sample", reads=["reward"], writes=["desirable"])
    flow.logprobs("reference")
    loss = partial(
        kto_loss, beta=cfg.beta, desirable_weight=cfg.desirable_weight, undesirable_weight=cfg.undesirable_weight
    )
    return flow.train("policy", loss=loss)


@algorithm("reward_model")
def reward_model(cfg: RewardModelConfig) -> Dataflow:
    """Bradley-Terry on a dataset of pairs: 2203.02155 eq. 1."""
    loss = partial(bradley_terry_loss, centering_coef=cfg.centering_coef)
    return Dataflow().preferences().train("reward_model", loss=loss)


def best_and_worst(reward: Tensor, *, min_gap: float = 0.0) -> Tensor:
    """Mark the sample with the highest reward +1, the one with the lowest -1, the others 0: online DPO, 2402.04792,
    with two samples; best against worst of G is 2404.19733's choice among scored samples.

    Of several with the same reward the first counts. A group whose rewards are all equal, or whose highest and lowest
    are less than `min_gap` apart, has nothing to say: 0 for all its samples.

    `reward`: `[G]`, any real dtype, finite. Returns `[G]` float32. Raises `ShapeError`, `ConfigError`.

    >>> best_and_worst(torch.tensor([0.0, 1.0, 0.5, 1.0]))
    tensor([-1.,  1.,  0.,  0.])
    """
    non_negative("algorithm.min_gap", min_gap)
    reward_G = finite_rewards(reward)
    preferred_G = torch.zeros(len(reward_G), dtype=torch.float32, device=reward.device)
    if len(reward_G) == 0:
        return preferred_G
    highest, lowest = reward_G.max(), reward_G.min()
    if highest == lowest or highest - lowest < min_gap:
        return preferred_G
    preferred_G[_first(reward_G == highest)] = 1.0
    preferred_G[_first(reward_G == lowest)] = -1.0
    return preferred_G


def good_or_bad(reward: Tensor, *, threshold: float = 0.5) -> Tensor:
    """Mark samples +1 where the reward is above `threshold`, -1 where it is not: the two kinds of KTO, 2402.01306.

    `reward`: `[G]`, any real dtype, finite. Returns `[G]` float32. Raises `ShapeError`.

    >>> good_or_bad(torch.tensor([1.0, 0.5, 0.0]))
    tensor([ 1., -1., -1.])
    """
    return torch.where(finite_rewards(reward) > threshold, 1.0, -1.0).float()


def _first(flags_G: Tensor) -> int:
    # argmax alone does not promise which of several equal values it finds
    return int(flags_G.nonzero()[0])
