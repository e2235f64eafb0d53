"""Log-ratios of the probabilities that two policies give a sampled token, or a whole response.

Every exp of a difference of log-probabilities in this package goes through one of these two, which clamp it.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from torch import Tensor

from penstock.algorithms.aggregation import in_float32
from penstock.conf.checks import one_of

LOG_RATIO_BOUND = 20.0
"""The bound that log-ratios are clamped to before exp, ±20. exp(20) = 4.9e8 is finite in float32 and far beyond any
ratio that is not a bug; beyond the bound the gradient is zero."""

SEQUENCE_RATIOS = ("geometric", "product")


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The difference `numerator - denominator` of two log-probabilities, float32, clamped to ±`LOG_RATIO_BOUND`."""
    return (in_float32(numerator) - in_float32(denominator)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor, how: str = "geometric") -> Tensor:
    """The log-ratio of whole responses, float32 `[B, 1]`, clamped to ±`LOG_RATIO_BOUND`; 0 for a row without a token.

    `numerator`, `denominator`: log-probabilities `[B, T]`, zero in padding. `mask`: bool `[B, T]`.
    `how`: "product", `Σ_t`, the ratio of the responses' probabilities; "geometric", `Σ_t / length`, the ratio a token,
    which does not drift with the length (2507.18071 eq. 7). The clamp is on the result, so that one token far off
    counts with what it is. Raises `ConfigError` for an unknown `how`.
    """
    one_of("ratio", how, SEQUENCE_RATIOS)
    sum_B1 = (in_float32(numerator) - in_float32(denominator)).sum(dim=-1, keepdim=True)
    if how == "geometric":
        sum_B1 = sum_B1 / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return sum_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
