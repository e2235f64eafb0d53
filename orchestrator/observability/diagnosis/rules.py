"""All rules of the diagnosis, which find what is wrong with a run from the metrics of its steps. Pure.

A warning says that something is broken or wasted; a hint, that it could be faster.
"""

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis import learning, waste
from penstock.orchestrator.observability.diagnosis.seen import Finding, Rule, Seen

RULES: tuple[Rule, ...] = (
    learning.no_spread, learning.cut_off, learning.mismatch, learning.other_distribution, learning.gradients,
    learning.entropy, learning.far_from_reference, waste.dropped, waste.filtered, waste.lazy_engine,
    waste.slow_rank, waste.padding, waste.idle, waste.evaluation,
)  # fmt: skip


def findings(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> list[Finding]:
    """Findings of all rules."""
    if not seen.is_long_enough:
        return []
    return [found for rule in RULES if (found := rule(seen, config, max_staleness)) is not None]
