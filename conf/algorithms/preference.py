"""Configuration of learning from preferences, of reward models, and of learning from a teacher."""

from dataclasses import dataclass, field

from penstock.conf.algorithms.base import MEANS, AlgorithmConfig
from penstock.conf.checks import above, at_least, one_of, within

PAIR_LOSSES = ("dpo", "ipo", "simpo", "orpo")
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")


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
        above("algorithm.beta", self.beta, 0)
        within("algorithm.label_smoothing", self.label_smoothing, 0, 0.5)
        at_least("algorithm.target_margin", self.target_margin, 0)
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
        within("algorithm.group_size", self.group_size, 2, 2)
        at_least("algorithm.centering_coef", self.centering_coef, 0)


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
        above("algorithm.beta", self.beta, 0)
        at_least("algorithm.desirable_weight", self.desirable_weight, 0)
        at_least("algorithm.undesirable_weight", self.undesirable_weight, 0)

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
        at_least("algorithm.group_size", self.group_size, 1)
        at_least("algorithm.candidates", self.candidates, 0)
        one_of("algorithm.divergence", self.divergence, DIVERGENCES)
        within("algorithm.beta", self.beta, 0, 1)
        within("algorithm.discount", self.discount, 0, 1)
        one_of("algorithm.aggregation", self.aggregation, MEANS)
