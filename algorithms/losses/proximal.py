"""Proximal policies: the centre of the trust region, which the ratio of a policy loss is taken against.

Decoupled PPO (2505.24298) has three policies: `π_behavior` sampled, `π_proximal` is where the trust region lies,
`π` is trained. The clipped ratio is `π / π_proximal`, and `π_proximal / π_behavior` becomes the weight of the
correction. Any surrogate is decoupled in this way; `proximal` says what stands for π_proximal:

    old            the trainer's own log-probabilities at the start of the batch. Costs a forward pass.
    column         the column `proximal_logprobs`, from a user's own stage.
    interpolated   between the behavior's and the current ones, by the column `staleness`. Costs nothing.

With "old" and the correction "none" there is one ratio, against the behavior policy.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import torch
from torch import Tensor

from penstock.algorithms.aggregation import in_float32, masked
from penstock.algorithms.checks import describe, same_shape
from penstock.conf.errors import ConfigError, ShapeError

PROXIMALS = ("old", "column", "interpolated")


def interpolated_logprobs(new: Tensor, behavior: Tensor, staleness: Tensor) -> Tensor:
    """A proximal policy that needs no forward pass: 2512.06547, log-linear between the policies that are known.

        log π_proximal = log π + (log π_behavior - log π) / d,   d = staleness;   log π where d = 0

    A token that is d updates old lies d steps behind π, the proximal policy one. One update old: the behavior policy
    itself. `new`, `behavior`: `[B, T]`. `staleness`: of the row `[B]` or the token `[B, T]`, at least 0. Returns
    `[B, T]` float32 without gradient. Raises `ShapeError`.
    """
    if staleness.shape not in (new.shape, new.shape[:1]):
        expected = f"{list(new.shape[:1])} (a row) or {list(new.shape)} (a token)"
        raise ShapeError(f"staleness is {describe(staleness)}; expected {expected}.")
    d = in_float32(staleness).nan_to_num().view(*staleness.shape, *[1] * (new.dim() - staleness.dim()))
    share = torch.where(d >= 1, 1 / d.clamp(min=1), 0.0)
    return new.detach() + share * (behavior - new.detach())


def proximal_anchor(
    proximal: str,
    new: Tensor,
    behavior: Tensor,
    mask: Tensor,
    proximal_logprobs: Tensor | None,
    staleness: Tensor | None,
) -> Tensor:
    """The log-probabilities `[B, T]` that "column" or "interpolated" name, float32 without gradient, zero in padding.

    `new`, `behavior`: zero in padding already. Raises `ConfigError` for a column that nothing writes, `ShapeError`.
    """
    if proximal == "column":
        column = _written("proximal_logprobs", proximal_logprobs, proximal)
        same_shape(new, "logprobs", proximal_logprobs=column)
        return masked(column, mask).detach()
    return interpolated_logprobs(new, behavior, _written("staleness", staleness, proximal))


def _written(name: str, column: Tensor | None, proximal: str) -> Tensor:
    if column is None:
        raise ConfigError(
            f"algorithm.proximal={proximal} needs {name}, which nothing writes. "
            "Let a stage before flow.train write it, or set algorithm.proximal=old."
        )
    return column
