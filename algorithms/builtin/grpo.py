"""Group-relative policy optimisation: a sample's advantage compares its reward with the others of its prompt.

    source ─▶ rollout ─▶ reward ─▶ group_advantage ─▶ train
                  └─▶ reference (only with kl_coef) ─────┘

2402.03300; with `normalize_std=False` Dr. GRPO's advantage (2503.20783), with `clip_high=0.28` DAPO's
clip-higher (2503.14476).
"""

from functools import partial

from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import ppo_clip_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import GrpoConfig


@algorithm("grpo")
def grpo(cfg: GrpoConfig) -> Dataflow:
    """A critic-free policy gradient: `group_size` samples a prompt, a clipped ratio, an optional KL term."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    if cfg.kl_coef:
        flow.logprobs("reference")
    advantage = partial(group_advantage, normalize_std=cfg.normalize_std)
    flow.compute(advantage, per="group", reads=["reward"], writes=["advantage"])
    loss = partial(
        ppo_clip_loss,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        kl_coef=cfg.kl_coef,
        aggregation=cfg.aggregation,
        correction=cfg.correction,
        correction_cap=cfg.correction_cap,
    )
    flow.train("policy", loss=loss)
    return flow
