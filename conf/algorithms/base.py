"""Configuration of the algorithms that Penstock brings. A user's own is a dataclass beside the user's dataflow."""

from dataclasses import dataclass

from penstock.conf.checks import at_least, one_of

MEANS = ("token_mean", "sequence_mean", "sequence_sum")
AGGREGATIONS = (*MEANS, "constant")
CORRECTIONS = ("none", "truncated")


@dataclass
class AlgorithmConfig:
    """Base of every algorithm's configuration."""

    name: str = "???"
    """The algorithm's name, set by `algorithm=NAME`."""
    group_size: int = 1
    """Samples per prompt."""


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
        at_least("algorithm.group_size", self.group_size, 1)
        for key in ("clip_low", "clip_high", "kl_coef", "correction_cap"):
            at_least(f"algorithm.{key}", getattr(self, key), 0)
        one_of("algorithm.aggregation", self.aggregation, MEANS)
        one_of("algorithm.correction", self.correction, CORRECTIONS)
