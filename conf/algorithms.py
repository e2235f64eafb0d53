"""Configurations of the algorithms that come with Penstock. A user's own is a dataclass beside the user's dataflow.

Policy gradients without a critic are one dataclass, with the papers' settings as its presets: most of them differ in a
name, of the advantage, the surrogate or the correction. All settings stay open in every preset:
`algorithm=gspo algorithm.advantage=rloo` is a run.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.checks import POSITIVE, above, at_least, check_bounds, one_of, within
from penstock.conf.errors import ConfigError

MEANS = ("token_mean", "sequence_mean", "sequence_sum")
AGGREGATIONS = (*MEANS, "constant")
CORRECTIONS = ("none", "truncated")
UNITS = ("group", "batch")
KL_PLACES = ("loss", "reward")
PROXIMALS = ("old", "interpolated")
STEPS = ("gae", "turn_gae")
PAIR_LOSSES = ("dpo", "ipo", "simpo", "orpo")
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")


@dataclass
class AlgorithmConfig:
    """Base of every algorithm's configuration."""

    name: str = "???"
    """The algorithm's name, set by `algorithm=NAME`."""
    group_size: int = 1
    """Samples per prompt."""
    epochs_per_batch: int = 1
    """Passes of one update over its batch, each in trainer.num_minibatches optimizer steps (ppo_epochs of verl,
    num_iterations of TRL). Above 1 the ratio is taken against the batch's start, so that the clip bounds all passes
    together; a critic is trained as often. 1: further passes cost an update each, and gain most where samples are
    dear."""


@dataclass
class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning on demonstrations."""

    name: str = "sft"
    aggregation: str = "token_mean"
    """Mean over the batch: token_mean, sequence_mean or sequence_sum, as for algorithm=grpo."""

    def __post_init__(self) -> None:
        one_of("algorithm.aggregation", self.aggregation, MEANS)


@dataclass
class GrpoConfig(AlgorithmConfig):
    """Group-relative policy optimisation (2402.03300)."""

    name: str = "grpo"
    group_size: int = 8
    normalize_std: bool = True
    """Divide by the group's standard deviation. False: as in Dr. GRPO (2503.20783)."""
    clip_low: float = 0.2
    """How far below 1 the ratio of new to old probability counts."""
    clip_high: float = 0.2
    """How far above 1 it counts: it is clipped to [1 - clip_low, 1 + clip_high]. 0.28 is DAPO's (2503.14476)."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference) in the loss. 0: no reference model is started."""
    aggregation: str = "token_mean"
    """Mean over the batch. token_mean: every token of the batch weighs the same. sequence_mean: every response does.
    sequence_sum: the mean of the responses' sums, so that long ones weigh more. The same over a constant length is
    algorithm=dr_grpo."""
    correction: str = "truncated"
    """Correction between engine and trainer: truncated (importance weight of the trainer's over the engine's
    probability, capped), or none (the ratio is taken against the engine's log-probabilities)."""
    correction_cap: float = 2.0
    """Largest importance weight."""

    def __post_init__(self) -> None:
        check_bounds(self, "algorithm", group_size=1, clip_low=0, clip_high=0, kl_coef=0, correction_cap=0)
        one_of("algorithm.aggregation", self.aggregation, MEANS)
        one_of("algorithm.correction", self.correction, CORRECTIONS)


@dataclass
class PolicyGradientConfig(AlgorithmConfig):
    """A group of samples a prompt, an advantage, a surrogate loss."""

    name: str = "policy_gradient"
    group_size: int = 8
    advantage: str = "grpo"
    """Name of the advantage: grpo, dr_grpo, rloo, opo, remax, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline,
    rae, by the role of each side of a game (with advantage_per=batch); in an environment also turn_rloo, gigpo and
    mt_grpo, by turns; or your own (`@advantage`)."""
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
        check_bounds(
            self, "algorithm",
            group_size=1, kl_coef=0, kl_target=0, kl_gain=0, entropy_coef=0, constant_tokens=0, overlong_tokens=0,
            overlong_limit=0, overlong_penalty=0,
        )  # fmt: skip
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
    advantage: str = "gae"
    """Steps of an episode: tokens (gae), or in an environment turns (turn_gae), whose rewards are then theirs."""
    gamma: float = 1.0
    """Discount per step. Responses are short episodes with one reward at the end: 1."""
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
        check_bounds(
            self, "algorithm",
            group_size=1, clip_low=0, clip_high=0, value_clip=0, kl_coef=0, kl_target=0, kl_gain=0, gamma=(0, 1),
            lam=(0, 1),
        )  # fmt: skip
        one_of("algorithm.advantage", self.advantage, STEPS)
        one_of("algorithm.proximal", self.proximal, PROXIMALS)
        if self.kl_target:
            above("algorithm.kl_coef", self.kl_coef, 0)  # what a factor moves must not start at 0


@dataclass
class DpoConfig(AlgorithmConfig):
    """Direct preference optimisation on a dataset of pairs (2305.18290), and related losses."""

    name: str = "dpo"
    group_size: int = 2
    loss: str = "dpo"
    """Name of the loss: dpo, ipo (2310.12036), simpo (2405.14734) or orpo (2403.07691). The last two need no
    reference."""
    beta: float = 0.1
    """Strength of the pull to the reference: larger stays closer. SimPO wants about 2."""
    label_smoothing: float = 0.0
    """Share of labels taken to be wrong (dpo)."""
    target_margin: float = 1.0
    """Margin by which the chosen response is to win (simpo)."""

    def __post_init__(self) -> None:
        one_of("algorithm.loss", self.loss, PAIR_LOSSES)
        check_bounds(self, "algorithm", target_margin=0, beta=POSITIVE, label_smoothing=(0, 0.5))
        self._check_group_size()

    def _check_group_size(self) -> None:
        within("algorithm.group_size", self.group_size, 2, 2)


@dataclass
class OnlineDpoConfig(DpoConfig):
    """DPO on the policy's own samples: the best of a group against the worst (2402.04792)."""

    name: str = "online_dpo"
    group_size: int = 4
    min_gap: float = 0.0
    """Least difference of rewards for a pair. Groups whose best and worst reward are less apart have no pair."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("algorithm.min_gap", self.min_gap, 0)

    def _check_group_size(self) -> None:
        at_least("algorithm.group_size", self.group_size, 2)


@dataclass
class RewardModelConfig(AlgorithmConfig):
    """A scalar head trained on pairs by the likelihood of Bradley and Terry."""

    name: str = "reward_model"
    group_size: int = 2
    centering_coef: float = 0.0
    """Coefficient of a term that keeps the sum of a pair's scores near 0 (2312.09244). 0: off; 0.01 is usual."""

    def __post_init__(self) -> None:
        check_bounds(self, "algorithm", centering_coef=0, group_size=(2, 2))


@dataclass
class KtoConfig(AlgorithmConfig):
    """Kahneman-Tversky optimisation on single responses of a dataset, each good or bad (2402.01306)."""

    name: str = "kto"
    beta: float = 0.1
    """Strength of the pull to the reference: larger stays closer."""
    threshold: float = 0.5
    """Reward above which responses are desirable, all others undesirable. In units of reward; 0.5 parts right from
    wrong."""
    desirable_weight: float = 1.0
    """Weight of desirable responses."""
    undesirable_weight: float = 1.0
    """Weight of undesirable ones. Where one kind is rarer, the paper raises its weight until the sums of both are
    alike."""

    def __post_init__(self) -> None:
        self._check_group_size()
        check_bounds(self, "algorithm", desirable_weight=0, undesirable_weight=0, beta=POSITIVE)

    def _check_group_size(self) -> None:
        within("algorithm.group_size", self.group_size, 1, 1)


@dataclass
class OnlineKtoConfig(KtoConfig):
    """KTO on the policy's own samples: the reference point is the divergence that a group's other samples show."""

    name: str = "online_kto"
    group_size: int = 4

    def _check_group_size(self) -> None:
        at_least("algorithm.group_size", self.group_size, 1)


@dataclass
class DistillConfig(AlgorithmConfig):
    """On-policy distillation: the student samples, a teacher (model.paths.teacher) judges every token (2306.13649)."""

    name: str = "distill"
    group_size: int = 4
    teacher: str = "teacher"
    """Model that judges: the one of model.paths.NAME, or `reference`, the policy as the run begins with it."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Teachers by row, in the place of `teacher`: the model of model.paths for each value of the row's `teacher_by`,
    {math: math_teacher, code: code_teacher}. Each scores its own rows alone."""
    teacher_by: str = "data_source"
    """Field that says whose row it is: a column, or any other that data.curriculum.by may name; data_source is the part
    of data.mixture."""
    candidates: int = 0
    """Tokens that the teacher finds likeliest, by which student and teacher are compared in each place, with all others
    together. 0: by the sampled token alone, a policy gradient."""
    divergence: str = "reverse_kl"
    """With candidates, what is gone down: forward_kl (cover all that the teacher says), reverse_kl (say nothing that it
    would not) or jensen_shannon (2306.13649)."""
    beta: float = 0.5
    """Weight of the teacher in jensen_shannon's mixture."""
    hint: str | None = None
    """Text that the teacher reads in the place of the user's, such as "{prompt} (The answer is {answer}.)", with the
    row's columns: the policy learns to do without it what it does with it (self-distillation, 2601.19897). `null`: the
    teacher reads what the student does."""
    discount: float = 0.0
    """Discount of later tokens, without candidates. 0: a token answers for itself. 1: also for where it leads
    (2306.08543)."""
    aggregation: str = "token_mean"
    """Mean over the batch: token_mean, sequence_mean or sequence_sum, as for algorithm=grpo."""

    def __post_init__(self) -> None:
        check_bounds(self, "algorithm", group_size=1, candidates=0, beta=(0, 1), discount=(0, 1))
        one_of("algorithm.divergence", self.divergence, DIVERGENCES)
        one_of("algorithm.aggregation", self.aggregation, MEANS)


def known_algorithms() -> dict[str, type[AlgorithmConfig]]:
    """Configuration classes of the algorithms in `algorithms/catalogue.py`, by name. Penstock's own are known by their
    dataclass: the catalogue would import torch, and neither a wrong key nor a report should take seconds. A user's file
    has imported the registry by now."""
    known = {
        cls.name: cls
        for cls in globals().values()
        if isinstance(cls, type) and issubclass(cls, AlgorithmConfig) and cls is not AlgorithmConfig
    }
    registry = sys.modules.get("penstock.algorithms.registry")
    return known | {name: entry.config_class for name, entry in (registry.ALGORITHMS if registry else {}).items()}
