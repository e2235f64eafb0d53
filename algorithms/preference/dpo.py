"""Direct preference optimisation: the policy is its own reward model, compared with a reference.

    r(x, y) = β · (log π(y | x) - log π_ref(y | x))          the implicit reward, 2305.18290 eq. 5
    h       = r(chosen) - r(rejected)                        the margin

Losses of `flow.train`: the trainer finds their arguments by name (`workers/trainer/update/minibatches.py`) and gives
`group_ids` beside the rest. Each returns this micro-batch's contribution to the mean over the groups of the optimizer
step, exactly the same however the minibatch is cut into whole groups.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.checks import positive, same_shape
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import (
    Pairs,
    mean_logprobs,
    response_mask,
    sequence_logprobs,
    token_log_ratios,
)
from penstock.conf.checks import within
from penstock.conf.errors import ConfigError


def dpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> LossAndMetrics:
    """DPO, 2305.18290 eq. 7, a pair: `-(1 - ε) log σ(h) - ε log σ(-h)`, with `ε = label_smoothing`.

    `ε = 0` is DPO. `ε > 0` is conservative DPO (E. Mitchell, 2023, "A note on DPO with noisy preferences"): labels are
    taken to be wrong with probability ε, and the loss is least at `h = log((1 - ε) / ε)` instead of at infinity.
    `reference_free`: the reference is uniform, `r = β log π(y | x)`.

    `logprobs`, `reference_logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with `r` as the reward. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    within("algorithm.label_smoothing", label_smoothing, 0.0, 0.5)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    ratios_BT = _against_reference(logprobs, reference_logprobs, valid, reference_free)
    chosen_P, rejected_P = pairs.split(beta * sequence_logprobs(ratios_BT, valid))
    margin_P = chosen_P - rejected_P
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    loss = pairs.mean(loss_P)
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def ipo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    beta: float = 0.1,
    length_normalize: bool = False,
    reference_free: bool = False,
) -> LossAndMetrics:
    """IPO, 2310.12036 eq. 17, a pair: `(h / β - 1 / (2 β))²`; the paper's τ is β.

    A regression of the log-ratio of the pair on `1 / (2 β)`: unlike DPO's loss it has its minimum there, even where
    every label agrees. `length_normalize`: log-ratios are means over the tokens of a response, not sums, so that the
    target does not depend on the length. `reference_free`: as in `dpo_loss`.

    Arguments and metrics: as in `dpo_loss`. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    ratios_BT = _against_reference(logprobs, reference_logprobs, valid, reference_free)
    over_tokens = mean_logprobs if length_normalize else sequence_logprobs
    chosen_P, rejected_P = pairs.split(over_tokens(ratios_BT, valid))
    loss = pairs.mean((chosen_P - rejected_P - 1 / (2 * beta)).square())
    return loss, pairs.metrics(loss, beta * chosen_P, beta * rejected_P)


def _against_reference(logprobs: Tensor, reference: Tensor | None, valid: Tensor, reference_free: bool) -> Tensor:
    """The log-ratio `log π - log π_ref` a token, `[B, T]`; `log π` where there is to be no reference."""
    if reference_free:
        return logprobs
    if reference is None:
        raise ConfigError(
            "the loss needs reference_logprobs, which nothing writes. "
            "Add flow.logprobs('reference') to the dataflow, or bind reference_free=True."
        )
    same_shape(logprobs, "logprobs", reference_logprobs=reference)
    return token_log_ratios(logprobs, reference, valid)
