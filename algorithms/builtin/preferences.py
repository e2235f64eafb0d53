"""Learning from preferences, of a dataset or on the policy's own samples: pairs, or single responses, good or bad.

    dpo         source ─▶ pair_responses ─ response_ids, preferred ─▶ train
                                └─▶ reference ────────────────────────┘
    online_dpo  source ─▶ rollout ─▶ reward ─▶ best_and_worst ─ preferred ─▶ train
                             └─▶ reference ──────────────────────────────────┘
    kto         source ─ response_ids ─▶ reward ─▶ good_or_bad ─ desirable ─▶ train
                             └─▶ reference ──────────────────────────────────┘
    online_kto  the same with a rollout before the reward

The losses get `group_ids`, so the trainer keeps each group in one micro-batch, and the store keeps it on one rank.
"""

from functools import partial
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.preference.dpo import dpo_loss, ipo_loss
from penstock.algorithms.preference.kto import kto_loss
from penstock.algorithms.preference.orpo import orpo_loss
from penstock.algorithms.preference.selection import best_and_worst, good_or_bad
from penstock.algorithms.preference.simpo import simpo_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms.preference import DpoConfig, KtoConfig, OnlineDpoConfig, OnlineKtoConfig


@algorithm("dpo")
def dpo(cfg: DpoConfig) -> Dataflow:
    """Direct preference optimisation on a dataset of pairs: 2305.18290."""
    return _trained(Dataflow().preferences(), cfg)


@algorithm("online_dpo")
def online_dpo(cfg: OnlineDpoConfig) -> Dataflow:
    """The best of a group against its worst, sampled by the policy itself: 2402.04792."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    select = partial(best_and_worst, min_gap=cfg.min_gap)
    flow.compute(select, per="group", reads=["reward"], writes=["preferred"])
    return _trained(flow, cfg)


def _trained(flow: Dataflow, cfg: DpoConfig) -> Dataflow:
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
    return _judged(Dataflow().demonstrations(), cfg)


@algorithm("online_kto")
def online_kto(cfg: OnlineKtoConfig) -> Dataflow:
    """KTO on the policy's own samples."""
    return _judged(Dataflow().rollout("policy", samples_per_prompt=cfg.group_size), cfg)


def _judged(flow: Dataflow, cfg: KtoConfig) -> Dataflow:
    flow.reward()
    flow.compute(partial(good_or_bad, threshold=cfg.threshold), per="sample", reads=["reward"], writes=["desirable"])
    flow.logprobs("reference")
    loss = partial(
        kto_loss,
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
    )
    return flow.train("policy", loss=loss)
