"""Rewards of tokens from one reward a response: all of it at the last token, and a KL penalty at each.

The "KL in the reward" of 1909.08593 eq. 2, in the form that InstructGPT (2203.02155) gave it. `compute` stages run it
before `gae`.

Legend: B rows, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included.
"""

import torch
from torch import Tensor

from penstock.algorithms.advantages.normalizer import finite_rewards
from penstock.algorithms.checks import as_mask, describe, has_axes
from penstock.algorithms.kl import kl_penalty
from penstock.conf.errors import ConfigError, ShapeError


def token_rewards(
    reward: Tensor,
    mask: Tensor,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    *,
    kl_coef: float | Tensor = 0.0,
    estimator: str = "k1",
) -> Tensor:
    """The rewards `r_t = -kl_coef · k(π || π_ref)_t`, plus the response's reward at the last token of the mask; `[B,
    T]` float32.

    `reward`: `[B]`, finite. `mask`, `logprobs` (of the policy that sampled), `reference_logprobs`: `[B, T]`; the latter
    two may be missing while `kl_coef` is 0. `kl_coef`: a number, or one a row `[B]`. Zero in padding; a row without a
    token is all zero, and its reward is lost, there being nothing to give it to. Raises `ShapeError`, `ConfigError`.
    """
    has_axes("mask", mask, "BT")
    valid = as_mask(mask)
    reward_B = finite_rewards(reward).float()
    if len(reward_B) != len(valid):
        raise ShapeError(f"reward is {describe(reward)}; expected {list(mask.shape[:1])}, a reward a row of the mask.")
    position_T = torch.arange(valid.shape[1], device=valid.device)
    last_B1 = torch.where(valid, position_T, -1).amax(dim=1, keepdim=True) if valid.shape[1] else None
    rewards = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
    if last_B1 is not None:
        rewards = torch.where(valid & (position_T == last_B1), reward_B.unsqueeze(-1), rewards)
    if logprobs is not None and reference_logprobs is not None:
        return rewards - kl_penalty(logprobs, reference_logprobs, valid, coef=kl_coef, estimator=estimator)
    if isinstance(kl_coef, Tensor) or kl_coef:
        raise ConfigError(f"algorithm.kl_coef={kl_coef} in the reward needs logprobs and reference_logprobs.")
    return rewards
