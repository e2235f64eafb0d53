"""Preference losses: learning from pairs of responses, of which one is preferred, or from single ones, good or bad.

Each pair loss has another reward r of a response, or probability of it, whose difference is the margin:

    dpo, ipo        r(x, y) = β · (log π(y | x) - log π_ref(y | x))      the implicit reward, 2305.18290 eq. 5
    simpo           r(x, y) = β / |y| · log π(y | x)                     without a reference, 2405.14734 eq. 4
    orpo            log P(y | x)    = 1 / |y| · log π(y | x)             without a reference, 2403.07691 eq. 3
                    log odds(y | x) = log P - log(1 - P)                 eq. 4
    bradley_terry   P(chosen ≻ rejected) = σ(s_chosen - s_rejected)      of scores s; R. Bradley and M. Terry, 1952

The rows of a pair are samples of one group; the column `preferred` says which: +1 chosen, -1 rejected, 0 takes no part.
It comes from a dataset of preferences or from `best_and_worst`. Kahneman-Tversky optimisation has no pairs:

    kto             r(x, y) = log π(y | x) - log π_ref(y | x)
                    z_0     = max(0, an estimate of KL(π || π_ref))      what a sample is measured against; no gradient

The trainer finds the arguments by name and gives `group_ids` beside the rest: whole groups are in one micro-batch. Each
loss returns this micro-batch's contribution to the mean over the groups of the optimizer step (kto: over its
sequences), exactly the same however the minibatch is cut into whole groups.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs, in ascending order of group id; G groups of the
micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals, in_float32, masked
from penstock.algorithms.checks import checked_mask, describe, has_axes, non_negative, positive, same_shape
from penstock.algorithms.losses import LossAndMetrics
from penstock.conf.checks import within
from penstock.conf.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Pairs:
    """The pairs of one micro-batch, and how many groups the whole optimizer step has.

    >>> pairs = Pairs.of(torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([7, 7, 7]), BatchTotals(0, 0, num_groups=1))
    >>> pairs.split(torch.tensor([0.5, 2.0, 9.0]))
    (tensor([2.]), tensor([0.5000]))
    """

    chosen_P: Tensor
    """Rows of the chosen samples, int64."""
    rejected_P: Tensor
    """Rows of the rejected samples of the same groups, int64."""
    num_groups: float
    """Number of groups of the whole optimizer step, those without a pair included."""

    @classmethod
    def of(cls, preferred: Tensor, group_ids: Tensor, totals: BatchTotals) -> "Pairs":
        """Find the pairs. `preferred`: `[B]`, any real dtype, +1, -1 or 0. `group_ids`: integers `[B]`, equal for
        samples of one group.

        A group has exactly one chosen and one rejected row, or none of either: it then adds 0, and counts in
        `totals.num_groups` all the same. Raises `ShapeError` that names the group otherwise, for other values, and for
        totals that count fewer groups than are here.
        """
        has_axes("preferred", preferred, "B")
        one_a_row(len(preferred), group_ids=group_ids)
        whole_numbers(group_ids)
        # Decided on the CPU: rows are few, and the values have to be looked at anyhow.
        signs_B, ids_B = signs("preferred", preferred), group_ids.detach().cpu()
        groups, group_of_B = torch.unique(ids_B, return_inverse=True)
        chosen_P, chosen_G = _rows_by_group(signs_B == 1, group_of_B, len(groups))
        rejected_P, rejected_G = _rows_by_group(signs_B == -1, group_of_B, len(groups))
        bad = ((chosen_G != rejected_G) | (chosen_G > 1)).nonzero()
        if len(bad):
            where = int(bad[0])
            raise ShapeError(
                f"preferred is {describe(preferred)}, and group {int(groups[where])} has {int(chosen_G[where])} chosen "
                f"(+1) and {int(rejected_G[where])} rejected (-1) rows; expected one of each, or 0 for all its rows."
            )
        if totals.num_groups < len(groups):
            raise ShapeError(
                f"totals.num_groups is {totals.num_groups}, but this micro-batch alone has {len(groups)}; expected the "
                "groups of the whole optimizer step."
            )
        return cls(chosen_P.to(preferred.device), rejected_P.to(preferred.device), totals.num_groups)

    def split(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the chosen and of the rejected rows, each `[P]`, differentiable."""
        return values_B[self.chosen_P], values_B[self.rejected_P]

    def mean(self, values_P: Tensor) -> Tensor:
        """This micro-batch's part of the mean over the minibatch's groups, `[]`. A group without a pair has 0."""
        return values_P.sum() / max(self.num_groups, 1)

    def metrics(self, loss: Tensor, chosen_reward_P: Tensor, rejected_reward_P: Tensor) -> dict[str, Tensor]:
        """Contributions, detached, of `loss`, `accuracy` (pairs whose margin is above 0), `margin` (chosen minus
        rejected reward), `chosen_reward`, `rejected_reward` and `pair_fraction` (groups that have a pair).

        All are means over the minibatch's groups; where some have no pair, divide by `pair_fraction`.
        """
        chosen_P, rejected_P = chosen_reward_P.detach(), rejected_reward_P.detach()
        return {
            "loss": loss.detach(),
            "accuracy": self.mean((chosen_P > rejected_P).to(chosen_P.dtype)),
            "margin": self.mean(chosen_P - rejected_P),
            "chosen_reward": self.mean(chosen_P),
            "rejected_reward": self.mean(rejected_P),
            "pair_fraction": self.mean(torch.ones_like(chosen_P)),
        }


def _rows_by_group(is_member_B: Tensor, group_of_B: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The rows where the flag is set, in order of their group; and how many each group has, `[G]`."""
    rows = is_member_B.nonzero().squeeze(-1)
    groups = group_of_B[rows]
    return rows[groups.argsort(stable=True)], torch.bincount(groups, minlength=num_groups)


def response_mask(logprobs: Tensor, mask: Tensor, **row_columns: Tensor) -> Tensor:
    """The mask as booleans `[B, T]`, after a look at the shapes of what every loss here takes.

    `row_columns`: expected `[B]`. Raises `ShapeError`.
    """
    valid = checked_mask("logprobs", logprobs, mask)
    one_a_row(len(logprobs), **row_columns)
    return valid


def one_a_row(num_rows: int, **columns: Tensor) -> None:
    """Check that every column is `[B]`. Raises `ShapeError`."""
    for name, column in columns.items():
        if not isinstance(column, Tensor) or column.shape != (num_rows,):
            raise ShapeError(f"{name} is {describe(column)}; expected [{num_rows}], one value a row.")


def whole_numbers(group_ids: Tensor) -> None:
    """Check that group ids are integers: as float32 those above 2^24 would fall together. Raises `ShapeError`."""
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ShapeError(f"group_ids is {describe(group_ids)}; expected integers, e.g. int64.")


def signs(name: str, column_B: Tensor) -> Tensor:
    """The column on the CPU, without gradient. Raises `ShapeError` if it holds anything but +1, -1 and 0."""
    signs_B = column_B.detach().cpu()
    bad = ((signs_B != 1) & (signs_B != -1) & (signs_B != 0)).nonzero()
    if len(bad):
        where = int(bad[0])
        raise ShapeError(
            f"{name} is {describe(column_B)} with {float(signs_B[where])} at row {where}; expected +1, -1 or 0."
        )
    return signs_B


def sequence_logprobs(logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The log-probability `log π(y | x)`: the sum over the response's tokens, `[B]` float32. A row without a token has
    0."""
    return masked(logprobs_BT, mask_BT).sum(dim=-1)


def mean_logprobs(logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The mean `log π(y | x) / |y|` over the response's tokens, `[B]` float32. A row without a token has 0."""
    return sequence_logprobs(logprobs_BT, mask_BT) / mask_BT.sum(dim=-1).clamp(min=1)


def token_log_ratios(logprobs_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The log-ratio `log π - log π_ref` a token, `[B, T]` float32, 0 in padding, with gradient into the first alone.

    Subtracted token by token and summed afterwards: two sums over thousands of tokens would leave few digits. Not
    clamped: what takes it is linear, or saturates by itself.
    """
    return masked(logprobs_BT, mask_BT) - masked(reference_BT.detach(), mask_BT)


LOG_PROBABILITY_BOUND = -1e-6
"""The largest mean log-probability that counts, since odds are infinite at P = 1. It bounds log odds by 13.8 and their
gradient by 1e6; above it the gradient of the odds is zero."""


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


def simpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    *,
    beta: float = 2.0,
    target_margin: float = 1.0,
) -> LossAndMetrics:
    """SimPO, 2405.14734 eq. 6, a pair: `-log σ(r(chosen) - r(rejected) - γ)`, with `γ = target_margin`.

    The paper takes β from 2 to 2.5 and γ from 0.3 to 1.6. A response without a token has `r = 0`.

    `logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with `r` as the reward; `margin` and `accuracy` are without γ.
    Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    non_negative("algorithm.target_margin", target_margin)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(beta * mean_logprobs(logprobs, valid))
    loss = pairs.mean(-logsigmoid(chosen_P - rejected_P - target_margin))
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def orpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    *,
    odds_ratio_coef: float = 0.1,
) -> LossAndMetrics:
    """ORPO, 2403.07691 eq. 6 and 7, a pair: `-log P(chosen) - λ log σ(log odds(chosen) - log odds(rejected))`.

    `λ = odds_ratio_coef`. The first term is the supervised one, a mean over the tokens of each chosen response, so that
    every pair weighs the same. A response without a token has `log P = 0`, which the bound makes a large odds.

    `logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with log odds as the reward; `sft_loss` and `odds_ratio_loss`, the two terms
    without λ. Raises `ShapeError`, `ConfigError`.
    """
    non_negative("algorithm.odds_ratio_coef", odds_ratio_coef)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(mean_logprobs(logprobs, valid))
    chosen_odds_P, rejected_odds_P = log_odds(chosen_P), log_odds(rejected_P)
    sft = pairs.mean(-chosen_P)
    odds_ratio = pairs.mean(-logsigmoid(chosen_odds_P - rejected_odds_P))
    loss = sft + odds_ratio_coef * odds_ratio
    metrics = pairs.metrics(loss, chosen_odds_P, rejected_odds_P)
    return loss, metrics | {"sft_loss": sft.detach(), "odds_ratio_loss": odds_ratio.detach()}


def log_odds(log_probability: Tensor) -> Tensor:
    """The log-odds `log(P / (1 - P))` of `log P`, elementwise, at most 13.8 (`LOG_PROBABILITY_BOUND`)."""
    bounded = log_probability.clamp(max=LOG_PROBABILITY_BOUND)
    return bounded - torch.log(-torch.expm1(bounded))  # 1 - exp(log P) would lose every digit near P = 1


def bradley_terry_loss(
    scores: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    margin: Tensor | None = None,
    *,
    centering_coef: float = 0.0,
) -> LossAndMetrics:
    """The negative log-likelihood of the preferences (2203.02155 eq. 1), a pair:

        -log σ(s_chosen - s_rejected - m) + η (s_chosen + s_rejected)²

    For a model with a scalar head: the trainer gives `scores`, with gradient, where other losses take `logprobs`.
    `m`: column `margin` of the chosen row, how much better it is at least (2307.09288 eq. 2); 0 without the column.
    `η = centering_coef` keeps scores around 0, which the likelihood leaves free (2312.09244 eq. 2).

    `scores`: `[B]`, with gradient. `preferred`: `[B]`, +1, -1 or 0; what scores and margins rows with 0 have does not
    matter. `group_ids`: int64 `[B]`. `margin`: `[B]`.
    Metrics: those of `Pairs.metrics`, with `s` as the reward; `margin` and `accuracy` are without `m`.
    Raises `ShapeError`, `ConfigError`.
    """
    non_negative("algorithm.centering_coef", centering_coef)
    has_axes("scores", scores, "B")
    one_a_row(len(scores), preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(in_float32(scores))
    loss_P = -logsigmoid(chosen_P - rejected_P - _margin(margin, scores, pairs))
    if centering_coef:
        loss_P = loss_P + centering_coef * (chosen_P + rejected_P).square()
    loss = pairs.mean(loss_P)
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def _margin(margin: Tensor | None, scores: Tensor, pairs: Pairs) -> Tensor:
    """The margin `m` of each pair, `[P]` or `[]`, without gradient."""
    if margin is None:
        return torch.zeros((), device=scores.device)
    one_a_row(len(scores), margin=margin)
    return in_float32(margin.detach())[pairs.chosen_P]


def kto_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    desirable: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor,
    kl_baseline: Tensor | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossAndMetrics:
    """KTO, 2402.01306, a sample, with λ the weight of its kind:

        λ (1 - σ(β (r - z_0)))  desirable,        λ (1 - σ(β (z_0 - r)))  undesirable

    `z_0` is `max(0, kl_baseline)` where a stage writes that column, and `group_baseline` otherwise. The paper's own
    estimate pairs prompts with responses to other prompts and is a mean over the batch, which no single micro-batch
    knows: compute it in a stage of its own. Either way the loss is the same however it is cut in whole groups.

    `logprobs`, `reference_logprobs`, `mask`: `[B, T]`. `desirable`: `[B]`, +1, -1, or 0 for rows that take no part.
    `group_ids`: int64 `[B]`. `kl_baseline`: `[B]`, in nats.
    Metrics, all means over the minibatch's sequences: `loss`; `accuracy`, the samples on the right side of z_0, and
    `margin`, by how much, `± β (r - z_0)`; `kl_baseline`; and for each kind its `desirable_fraction` and
    `desirable_reward`, `β r`: divide the one by the other for a mean over the kind. Rows without a token add 0 and
    count nowhere. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    non_negative("algorithm.desirable_weight", desirable_weight)
    non_negative("algorithm.undesirable_weight", undesirable_weight)
    valid = response_mask(logprobs, mask, desirable=desirable, group_ids=group_ids)
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
    whole_numbers(group_ids)
    ratio_B = sequence_logprobs(token_log_ratios(logprobs, reference_logprobs, valid), valid)
    has_tokens_B = valid.any(dim=-1)
    sign_B = signs("desirable", desirable).to(ratio_B) * has_tokens_B
    baseline_B = _baseline(kl_baseline, ratio_B, group_ids, has_tokens_B)
    margin_B = sign_B * beta * (ratio_B - baseline_B)
    good_B, bad_B = (sign_B > 0).to(ratio_B), (sign_B < 0).to(ratio_B)
    weight_B = desirable_weight * good_B + undesirable_weight * bad_B

    def mean(values_B: Tensor) -> Tensor:
        return values_B.sum() / max(totals.num_sequences, 1)

    loss = mean(weight_B * torch.sigmoid(-margin_B))  # 1 - σ(x), without the cancellation
    reward_B = beta * ratio_B.detach()
    return loss, {
        "loss": loss.detach(),
        "accuracy": mean((margin_B.detach() > 0).to(ratio_B)),
        "margin": mean(margin_B.detach()),
        "kl_baseline": mean(baseline_B * has_tokens_B),
        "desirable_fraction": mean(good_B),
        "undesirable_fraction": mean(bad_B),
        "desirable_reward": mean(good_B * reward_B),
        "undesirable_reward": mean(bad_B * reward_B),
    }


def group_baseline(log_ratio: Tensor, group_ids: Tensor, counts: Tensor) -> Tensor:
    """The baseline `z_0` of each row from the other rows of its group: `max(0, mean of their log-ratios)`, `[B]`,
    detached.

    For groups that the policy sampled itself, an estimate of KL(π || π_ref) at the row's prompt that does not depend on
    the row. A row with no other has 0. `log_ratio`: `[B]`. `counts`: bool `[B]`, rows that enter the means, whatever
    their label. The mean of a group is within one micro-batch, so no cut in whole groups changes it.
    """
    values_B = torch.where(counts, log_ratio.detach(), 0.0).double()
    group_of_B = torch.unique(group_ids, return_inverse=True)[1]
    sums_G = values_B.new_zeros(len(group_ids)).index_add(0, group_of_B, values_B)
    numbers_G = values_B.new_zeros(len(group_ids)).index_add(0, group_of_B, counts.double())
    others_B = numbers_G[group_of_B] - counts.double()
    mean_B = (sums_G[group_of_B] - values_B) / others_B.clamp(min=1)
    return mean_B.clamp(min=0).to(log_ratio.dtype)


def _baseline(kl_baseline: Tensor | None, ratio_B: Tensor, group_ids: Tensor, has_tokens_B: Tensor) -> Tensor:
    if kl_baseline is None:
        return group_baseline(ratio_B, group_ids, has_tokens_B)
    one_a_row(len(ratio_B), kl_baseline=kl_baseline)
    return in_float32(kl_baseline.detach()).clamp(min=0)
