"""Losses that are sums over tokens, for callers who choose the weight of each token themselves: what a loop sends with
`forward_backward`. Names, inputs and formulas are those of the Tinker API (tinker-docs.thinkingmachines.ai, Losses).

    loss = summed_loss("ppo", {"clip_low_threshold": 0.9})      # a loss as the trainer calls it (`losses/__init__.py`)
    check_inputs("ppo", {"logprobs", "advantages"})             # DataError for one that is missing or unknown

With p the model's probability of a target, q that at sampling (input `logprobs`), A the advantage (`advantages`), r =
p / q and w the token's weight (`weights`, an input of every loss, 1 where there is none):

    cross_entropy         -sum w log p
    importance_sampling   -sum w r A
    ppo                   -sum w min(r A, clip(r, low, high) A)
    cispo                 -sum w sg(clip(r, low, high)) A log p                     sg: without gradient
    dro                   -sum w (A log p - beta / 2 log(r)^2)
    gspo                  -sum w min(s A, clip(s, low, high) A)                     s: one ratio a sequence, see `gspo`

No loss divides by a number of tokens. Bounds are those of the ratio itself (0.8 and 1.2, not 0.2): config keys
`clip_low_threshold` and `clip_high_threshold`, or inputs of these names with a bound for each token, which come first.

Legend: B sequences, T targets of each, padded: what lies under `mask == 0` counts for nothing.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.losses.policy import LossAndMetrics
from penstock.conf.errors import DataError, suggest

SummedLoss = Callable[..., LossAndMetrics]
CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""Bounds of the ratio where neither config nor inputs have any. Tinker's documentation gives 0.2 to either side for
ppo; for cispo and gspo it names no numbers."""
BETA = 0.05
"""Default of dro's beta. Tinker's documentation names none; its example has 0.05."""
SETTINGS = {"clip_low_threshold": "low", "clip_high_threshold": "high", "beta": "beta"}
"""Parameters of the formulas by keys of a loss's config."""
INPUTS = {"logprobs": "behavior_logprobs"}
"""Parameters of the formulas by names of a datum's inputs, where they differ: `logprobs` is the model's own here."""


def cross_entropy(logprobs: Tensor, mask: Tensor, weights: Tensor | None = None) -> LossAndMetrics:
    """Negative log-likelihood, `-sum w log p`. All tensors `[B, T]`."""
    return _summed(-logprobs, mask, weights)


def importance_sampling(
    logprobs: Tensor, mask: Tensor, behavior_logprobs: Tensor, advantages: Tensor, weights: Tensor | None = None
) -> LossAndMetrics:
    """REINFORCE with the ratio to the sampling policy, `-sum w r A`. All tensors `[B, T]`."""
    return _summed(-_ratio(logprobs, behavior_logprobs, advantages) * advantages, mask, weights)


def ppo(
    logprobs: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    clip_low_threshold: Tensor | None = None,
    clip_high_threshold: Tensor | None = None,
    *,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> LossAndMetrics:
    """PPO's clipped surrogate (1707.06347 eq. 7), summed. All tensors `[B, T]`."""
    ratio = _ratio(logprobs, behavior_logprobs, advantages)
    clipped = _clipped(ratio, clip_low_threshold, clip_high_threshold, low, high)
    return _summed(-torch.minimum(ratio * advantages, clipped * advantages), mask, weights)


def cispo(
    logprobs: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    clip_low_threshold: Tensor | None = None,
    clip_high_threshold: Tensor | None = None,
    *,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> LossAndMetrics:
    """CISPO (2506.13585 eq. 4), summed: the clipped ratio is a constant factor. All tensors `[B, T]`."""
    ratio = _ratio(logprobs.detach(), behavior_logprobs, advantages)
    clipped = _clipped(ratio, clip_low_threshold, clip_high_threshold, low, high)
    return _summed(-clipped * logprobs * advantages, mask, weights)


def dro(
    logprobs: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    *,
    beta: float = BETA,
) -> LossAndMetrics:
    """DRO (2405.19107), summed: `-sum w (A log p - beta / 2 log(p / q)^2)`. All tensors `[B, T]`. The quadratic term
    counts at every target of weight other than 0, whatever its advantage."""
    square = (logprobs - behavior_logprobs).square()
    return _summed(0.5 * beta * square - logprobs * advantages, mask, weights)


def gspo(
    logprobs: Tensor,
    mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    weights: Tensor | None = None,
    clip_low_threshold: Tensor | None = None,
    clip_high_threshold: Tensor | None = None,
    *,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> LossAndMetrics:
    """GSPO-token (2507.18071 eq. 13-14), summed. `s_t = sg(s) p_t / sg(p_t)`, with s the geometric mean of the ratios
    of a sequence's targets where `sequence_ratio_mask` is not 0 (1 if it is nowhere). All tensors `[B, T]`."""
    counts = mask & (sequence_ratio_mask != 0)
    log_ratio = torch.where(counts, logprobs.detach() - behavior_logprobs, 0.0)
    mean_B1 = log_ratio.sum(dim=1, keepdim=True) / counts.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (mean_B1 + (logprobs - logprobs.detach())).exp()
    clipped = _clipped(ratio, clip_low_threshold, clip_high_threshold, low, high)
    return _summed(-torch.minimum(ratio * advantages, clipped * advantages), mask, weights)


LOSSES: dict[str, SummedLoss] = {
    formula.__name__: formula for formula in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}
"""The losses by name."""


def summed_loss(name: str, config: Mapping[str, Any]) -> SummedLoss:
    """The loss of that name, with its numbers. Raises `DataError` for a name, a key or a value that it does not
    know."""
    formula, settings = _formula(name), {}
    known = [key for key, parameter in SETTINGS.items() if parameter in inspect.signature(formula).parameters]
    for key, value in config.items():
        if key not in known:
            raise DataError(f"loss {name!r} has no setting {key!r}{suggest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"loss {name!r}: {key}={value!r} is no finite number. Give one, or leave it out.")
        settings[SETTINGS[key]] = float(value)
    if "low" in settings or "high" in settings:
        low, high = settings.get("low", CLIP_LOW), settings.get("high", CLIP_HIGH)
        if low > high:
            raise DataError(f"loss {name!r}: clip_low_threshold={low} is above clip_high_threshold={high}. Swap them.")
    return partial(formula, **settings)


def check_inputs(name: str, inputs: Collection[str]) -> None:
    """Raise `DataError` for an input of a datum that the loss does not know, or one that it lacks. `inputs`: names of
    all but the targets."""
    required, optional = inputs_of(name)
    for given in inputs:
        if given not in required + optional:
            raise DataError(f"loss {name!r} has no input {given!r}{suggest(given, required + optional)}")
    for needed in required:
        if needed not in inputs:
            raise DataError(f"loss {name!r} needs the input {needed!r}, with one number for each target.")


def inputs_of(name: str) -> tuple[list[str], list[str]]:
    """Names of the inputs that a loss must have, and of those that it may have. Raises `DataError` for an unknown
    loss."""
    names = {parameter: given for given, parameter in INPUTS.items()}
    required: list[str] = []
    optional: list[str] = []
    for parameter in inspect.signature(_formula(name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name in ("logprobs", "mask"):
            continue
        (required if parameter.default is parameter.empty else optional).append(
            names.get(parameter.name, parameter.name)
        )
    return required, optional


def _formula(name: str) -> SummedLoss:
    if name not in LOSSES:
        raise DataError(f"there is no loss {name!r}{suggest(name, LOSSES)}")
    return LOSSES[name]


def _ratio(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """`p / q`, and 1 where the advantage is 0: there an infinite one would not vanish in the product."""
    return torch.where(advantages != 0, logprobs - behavior_logprobs, 0.0).exp()


def _clipped(ratio: Tensor, lows: Tensor | None, highs: Tensor | None, low: float, high: float) -> Tensor:
    if lows is None and highs is None:
        return ratio.clamp(low, high)
    lows = torch.full_like(ratio, low) if lows is None else lows
    highs = torch.full_like(ratio, high) if highs is None else highs
    return torch.minimum(torch.maximum(ratio, lows), highs)


def _summed(values: Tensor, mask: Tensor, weights: Tensor | None) -> LossAndMetrics:
    loss = torch.where(mask, values if weights is None else values * weights, 0.0).sum()
    return loss, {"loss": loss.detach()}
