"""Pairs of rows of a micro-batch that are compared, and sums over a row's tokens.

The rows of a pair are samples of one group; column `preferred` says which: +1 chosen, -1 rejected, 0 takes no part. It
comes from a dataset of preferences or from `best_and_worst`. The trainer keeps whole groups in one micro-batch for
losses that take `group_ids`. The losses of this folder call it first.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs, in ascending order of group id.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, masked
from penstock.algorithms.checks import as_mask, describe, has_axes, same_shape
from penstock.conf.errors import ShapeError


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
    has_axes("logprobs", logprobs, "BT")
    same_shape(logprobs, "logprobs", mask=mask)
    one_a_row(len(logprobs), **row_columns)
    return as_mask(mask)


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
