"""Limits beyond which a run reports that something is wrong with it."""

from dataclasses import dataclass

from penstock.conf.checks import AUTO, POSITIVE, above, auto_or_number, check_bounds

MISMATCH, MISMATCH_EXACT = 0.1, 1e-4


@dataclass
class DiagnosisConfig:
    """Settings of the rules. Each looks at the last `window` steps. What it finds is reported as an event, and as a
    line that says what to do."""

    enabled: bool = True
    """False: the run does not look at itself."""
    window: int = 10
    """Steps that a rule looks at; before so many it reports nothing. Fewer are noise."""
    cut_off_share: float = 0.5
    """Share of responses that ended at the limit of tokens, above which lengths are reported as out of hand."""
    mismatch: int | float | str = AUTO
    """Mean |Δ log p| between trainer and engine, above which they are reported to compute different policies. auto:
    0.1, of which bfloat16 alone makes 0.01; 0.0001 where both compute in float32, so that rounding makes a tenth of it
    at most."""
    mismatch_growth: float = 10.0
    """Growth of the mismatch since the first steps, above which it is reported as well, if it is above 0.001."""
    entropy_share: float = 0.02
    """Share of the first steps' entropy, below which the policy has collapsed, unless the reward has risen."""
    kl: float = 10.0
    """Divergence from the reference, in nats a token, above which the policy is reported to have left it."""
    grad_norm_growth: float = 100.0
    """Ratio to the median of the steps before, above which a gradient norm is large. It is reported if half of the
    window's are."""
    dropped_share: float = 0.3
    """Share of the samples that were dropped because something was wrong with them."""
    filtered_share: float = 0.8
    """Share of the samples that the algorithm's own filter drops, because their groups agree on the reward. At four
    fifths five samples are made for each that is trained."""
    engine_share: float = 0.25
    """Share of the groups that an average engine samples, below which an engine is reported as held up. Engines take
    groups as they have room, so responses of unequal lengths alone do not make so much."""
    rank_slowdown: float = 2.0
    """Ratio of the seconds of a rank's forward passes to the other ranks', above which they wait for it. It is reported
    if it is the same rank in most steps, and costs a tenth of the step. Rows are spread over ranks by their tokens, so
    those alone do not make twice."""
    padding_share: float = 0.6
    """Share of the micro-batches' tokens that only pad shorter rows. Micro-batches are cut where padding costs more
    than one more of them, so that most of it is there only if rows of a group must stay together."""
    idle_share: float = 0.5
    """Share of a step that engines or ranks waited, above which there are too many of them. Where they take turns
    (max_staleness=0): what overlapping would hide of a step."""
    stall_factor: float = 10.0
    """Ratio to the median step, beyond which a step is stalled, if it is twice the longest so far as well. Then the run
    reports which processes wait for which."""
    stall_least_s: float = 60.0
    """Seconds before which no step is stalled."""
    evaluation_share: float = 0.6
    """Share of the time, above which evaluation is reported as expensive."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "diagnosis",
            window=2, rank_slowdown=1, mismatch_growth=POSITIVE, kl=POSITIVE, grad_norm_growth=POSITIVE,
            stall_factor=POSITIVE, stall_least_s=POSITIVE, cut_off_share=(0.0, 1.0), entropy_share=(0.0, 1.0),
            dropped_share=(0.0, 1.0), filtered_share=(0.0, 1.0), engine_share=(0.0, 1.0), padding_share=(0.0, 1.0),
            idle_share=(0.0, 1.0), evaluation_share=(0.0, 1.0),
        )  # fmt: skip
        if not auto_or_number("diagnosis.mismatch", self.mismatch):
            above("diagnosis.mismatch", self.mismatch, 0)

    def largest_mismatch(self, *, is_exact: bool) -> float:
        """Largest difference that is none. `is_exact`: rounding in float32 alone should make one."""
        return (MISMATCH_EXACT if is_exact else MISMATCH) if isinstance(self.mismatch, str) else float(self.mismatch)
