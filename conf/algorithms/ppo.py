"""Configuration of PPO and of the reward models that it may follow."""

from dataclasses import dataclass

from penstock.conf.algorithms.base import AlgorithmConfig
from penstock.conf.algorithms.policy_gradient import PROXIMALS
from penstock.conf.checks import above, at_least, one_of, within


@dataclass
class PpoConfig(AlgorithmConfig):
    """PPO with a critic (1707.06347), the KL penalty in the reward (2203.02155)."""

    name: str = "ppo"
    group_size: int = 1
    """Samples a prompt; the critic makes groups unnecessary."""
    reward_model: bool = False
    """True: rewards are the scores of model.paths.reward_model, not those of reward.function."""
    gamma: float = 1.0
    """Discount per token. Responses are short episodes with one reward at the end: 1."""
    lam: float = 0.95
    """The λ of GAE: 1 trusts the returns alone, 0 the critic alone."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    value_clip: float = 0.2
    """Largest move of a value in one update, in units of reward."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the rewards of tokens. 0: no reference model is started."""
    kl_target: float = 0.0
    """Divergence that an adaptive coefficient, which starts at kl_coef, steers towards (1909.08593). Nats a response;
    0: kl_coef stays."""
    kl_gain: float = 0.1
    """Speed of the adaptive coefficient: it moves by at most a fifth of this share a step."""
    proximal: str = "old"
    """Policy that the ratio is taken against: see `PolicyGradientConfig`."""

    def __post_init__(self) -> None:
        at_least("algorithm.group_size", self.group_size, 1)
        for key in ("clip_low", "clip_high", "value_clip", "kl_coef", "kl_target", "kl_gain"):
            at_least(f"algorithm.{key}", getattr(self, key), 0)
        one_of("algorithm.proximal", self.proximal, PROXIMALS)
        if self.kl_target:
            above("algorithm.kl_coef", self.kl_coef, 0)  # what a factor moves must not start at 0
        within("algorithm.gamma", self.gamma, 0, 1)
        within("algorithm.lam", self.lam, 0, 1)


@dataclass
class RewardModelConfig(AlgorithmConfig):
    """A scalar head trained on pairs by the likelihood of Bradley and Terry."""

    name: str = "reward_model"
    group_size: int = 2
    centering_coef: float = 0.0
    """Coefficient of a term that keeps the sum of a pair's scores near 0 (2312.09244). 0: off; 0.01 is usual."""

    def __post_init__(self) -> None:
        within("algorithm.group_size", self.group_size, 2, 2)
        at_least("algorithm.centering_coef", self.centering_coef, 0)
