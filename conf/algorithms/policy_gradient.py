"""Configuration of the policy gradients: PPO with its critic; and one dataclass for all without one, with the papers'
settings as its presets.

Most methods without a critic differ in a name: of the advantage, the surrogate, the correction. All settings stay open
in every preset: `algorithm=gspo algorithm.advantage=rloo` is a run.
"""

from dataclasses import dataclass, field
from typing import Any

from penstock.conf.algorithms.base import AGGREGATIONS, AlgorithmConfig
from penstock.conf.checks import above, at_least, one_of, within
from penstock.conf.errors import ConfigError

UNITS = ("group", "batch")
KL_PLACES = ("loss", "reward")
PROXIMALS = ("old", "interpolated")


@dataclass
class PolicyGradientConfig(AlgorithmConfig):
    """A group of samples a prompt, an advantage, a surrogate loss."""

    name: str = "policy_gradient"
    group_size: int = 8
    advantage: str = "grpo"
    """Name of the advantage: grpo, dr_grpo, rloo, opo, remax, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline,
    rae, by the role of each side of a game (with advantage_per=batch); in an environment also turn_rloo, by the rewards
    of turns; or your own (`@advantage`)."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Keyword settings of the advantage."""
    advantage_per: str = "group"
    """Unit of the advantage. group: computed as soon as a group has its rewards. batch: by the trainers, over the
    step's batch; for advantages that take statistics of the batch."""
    surrogate: str = "ppo_clip"
    """Name of the surrogate: ppo_clip, reinforce, gpg, gspo, gspo_token, gmpo, cispo, sapo, clip_cov, kl_cov, dppo_tv,
    or your own (`@surrogate`)."""
    surrogate_options: dict[str, Any] = field(default_factory=dict)
    """Keyword settings of the surrogate, e.g. {clip_low: 0.2, clip_high: 0.28}."""
    correction: str = "truncated"
    """Correction between engine and trainer: none, truncated, sequence_truncated, masked, rejection, or your own
    (`@correction`)."""
    correction_options: dict[str, Any] = field(default_factory=dict)
    """Keyword settings of the correction, e.g. {cap: 2.0}."""
    proximal: str = "old"
    """Policy that the ratio is taken against, and the correction weighs (2505.24298). old: the trainer's
    log-probabilities, recomputed at the start of the batch. interpolated: between the engine's and the current ones, by
    the token's staleness, without a forward pass (2512.06547)."""
    kl_coef: float = 0.0
    """Weight of the KL estimate in the loss or in the reward. 0: no reference model is started."""
    kl_in: str = "loss"
    """Place of the KL estimate. loss: a term a token, with a gradient. reward: the response's log-ratio is taken off
    its reward (1909.08593)."""
    kl_estimator: str = "k3"
    """KL estimator for kl_in=loss: k1, k2, k3, and their straight-through variants. In the reward it is k1, which is
    exact."""
    kl_target: float = 0.0
    """Divergence that an adaptive coefficient, which starts at kl_coef, steers towards with kl_in=reward (1909.08593).
    Wants advantage_per=batch. Nats a response; 0: kl_coef stays."""
    kl_gain: float = 0.1
    """Speed of the adaptive coefficient: it moves by at most a fifth of this share a step."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. 0: no gradient of the entropy is computed."""
    aggregation: str = "token_mean"
    """Mean over the batch. token_mean: every token of the batch weighs the same. sequence_mean: every response does.
    sequence_sum: tokens summed, responses averaged. constant: as that, divided by constant_tokens."""
    constant_tokens: float = 0
    """Divisor of a response's sum with aggregation=constant. 0: the longest response allowed, which is
    rollout.sampling.max_tokens or an environment's environment.max_tokens, as in the paper's code (2503.20783,
    listing 1) and in TRL. Tokens."""
    drop_uniform_groups: bool = False
    """True: drop groups whose rewards are all equal, which have no gradient (dropped/no_signal), and new ones take
    their place while the step still waits for others. DAPO's dynamic sampling (2503.14476, section 3.2)."""
    overlong_tokens: int = 0
    """Range in which long responses lose reward: those longer than `overlong_limit - overlong_tokens` in proportion, up
    to `overlong_penalty` at the limit: DAPO's soft punishment (2503.14476 eq. 13). 0: none. Tokens."""
    overlong_limit: int = 0
    """Longest response, rollout.sampling.max_tokens as a rule. Tokens."""
    overlong_penalty: float = 1.0
    """Reward that a response of the longest length loses."""

    def __post_init__(self) -> None:
        at_least("algorithm.group_size", self.group_size, 1)
        for key in (
            "kl_coef", "kl_target", "kl_gain", "entropy_coef", "constant_tokens", "overlong_tokens", "overlong_limit",
            "overlong_penalty",
        ):  # fmt: skip
            at_least(f"algorithm.{key}", getattr(self, key), 0)
        one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        one_of("algorithm.advantage_per", self.advantage_per, UNITS)
        one_of("algorithm.kl_in", self.kl_in, KL_PLACES)
        one_of("algorithm.proximal", self.proximal, PROXIMALS)
        at_least("algorithm.overlong_limit", self.overlong_limit, self.overlong_tokens)
        if self.kl_target:
            self._check_adaptive()

    def _check_adaptive(self) -> None:
        above("algorithm.kl_coef", self.kl_coef, 0)  # what a factor moves must not start at 0
        for key, needed in (("kl_in", "reward"), ("advantage_per", "batch")):
            if getattr(self, key) != needed:
                raise ConfigError(
                    f"algorithm.kl_target={self.kl_target} with algorithm.{key}={getattr(self, key)}: the coefficient "
                    f"follows the step's batch, in the reward. Set algorithm.{key}={needed}, or algorithm.kl_target=0."
                )


@dataclass
class DrGrpoConfig(PolicyGradientConfig):
    """GRPO without its two biases, by length and by difficulty (2503.20783)."""

    name: str = "dr_grpo"
    advantage: str = "dr_grpo"
    aggregation: str = "constant"


@dataclass
class DapoConfig(PolicyGradientConfig):
    """Clip-higher, dynamic sampling, token mean, soft punishment of long responses (2503.14476)."""

    name: str = "dapo"
    surrogate_options: dict[str, Any] = field(default_factory=lambda: {"clip_low": 0.2, "clip_high": 0.28})
    drop_uniform_groups: bool = True


@dataclass
class RlooConfig(PolicyGradientConfig):
    """REINFORCE with a leave-one-out baseline (2402.14740)."""

    name: str = "rloo"
    advantage: str = "rloo"
    surrogate: str = "reinforce"
    aggregation: str = "sequence_sum"


@dataclass
class ReinforcePpConfig(PolicyGradientConfig):
    """REINFORCE++ with the group's mean as baseline, scaled by the batch (2501.03262)."""

    name: str = "reinforce_pp"
    advantage: str = "reinforce_plus_plus_baseline"
    advantage_per: str = "batch"


@dataclass
class RemaxConfig(PolicyGradientConfig):
    """REINFORCE with the greedy response's reward as baseline (2310.10505)."""

    name: str = "remax"
    group_size: int = 1
    advantage: str = "remax"
    surrogate: str = "reinforce"
    aggregation: str = "sequence_sum"


@dataclass
class GspoConfig(PolicyGradientConfig):
    """The ratio of whole responses (2507.18071)."""

    name: str = "gspo"
    surrogate: str = "gspo"
    surrogate_options: dict[str, Any] = field(default_factory=lambda: {"clip_low": 3e-4, "clip_high": 4e-4})
    aggregation: str = "sequence_mean"


@dataclass
class CispoConfig(PolicyGradientConfig):
    """Clipped importance weights that no token loses its gradient to (2506.13585)."""

    name: str = "cispo"
    surrogate: str = "cispo"
    surrogate_options: dict[str, Any] = field(default_factory=lambda: {"clip_low": 1.0, "clip_high": 4.0})


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
    """How far below 1 the ratio of new to old probability counts."""
    clip_high: float = 0.2
    """How far above 1 it counts: it is clipped to [1 - clip_low, 1 + clip_high]."""
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
