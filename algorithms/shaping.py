"""Shaping of rewards, and of groups, before there is an advantage: functions of `compute` and `filter` stages.

A KL penalty in the reward of whole responses has a coefficient that is fixed, or follows a target from step to step:

    reference ─ reference_logprobs ─┬─▶ penalized_reward ─▶ advantage …
                                    └─▶ next_coefficient ─ kl_coef ─▶ ▲        per batch, with kl_target

With a fixed coefficient there is one stage, and it needs no batch; an adaptive one is a state of the trainers
(`Dataflow.compute(state=…)`), so that what reads it is per batch.

Legend: G samples of one group (the same prompt); N samples of a unit; T_i response tokens of sample i.
"""

import torch
from torch import Tensor

from penstock.algorithms.advantages import finite_rewards
from penstock.algorithms.checks import non_negative, same_shape
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.kl import AdaptiveKl, kl_estimate
from penstock.conf.errors import ConfigError, ShapeError

KL_COEF = Column("kl_coef", "float32")


def has_signal(reward: Tensor) -> bool:
    """Return whether the rewards of a group differ. A group that agrees has advantage 0 throughout: DAPO's dynamic
    sampling keeps those with `0 < correct < G`, 2503.14476 eq. 11.

    `reward`: `[G]`, finite. Raises `ShapeError`.
    """
    reward_G = finite_rewards(reward)
    return len(reward_G) > 1 and bool((reward_G != reward_G[0]).any())


def overlong_reward(
    reward: Tensor, response_ids: list[Tensor], *, limit: int, buffer: int, penalty: float = 1.0
) -> Tensor:
    """The reward less a soft punishment of long responses, 2503.14476 eq. 13:

        0                                         up to limit - buffer tokens
        penalty · (tokens - (limit - buffer)) / buffer    up to limit
        penalty                                   beyond

    `reward`: `[N]`. `response_ids`: `[T_i]` each, of which only the length counts. `limit`, `buffer`: tokens. Returns
    `[N]` float32. Raises `ShapeError`, `ConfigError`.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"algorithm.overlong_tokens={buffer} must lie above 0 and not above algorithm.overlong_limit={limit}."
        )
    non_negative("algorithm.overlong_penalty", penalty)
    reward_N = finite_rewards(reward)
    if len(response_ids) != len(reward_N):
        raise ShapeError(f"response_ids has {len(response_ids)} rows; expected {len(reward_N)}, as many as reward.")
    length_N = torch.tensor([len(tokens) for tokens in response_ids], dtype=torch.float64)
    share_N = ((length_N - (limit - buffer)) / buffer).clamp(0.0, 1.0)
    return (reward_N - penalty * share_N).float()


def penalized_reward(
    reward: Tensor, behavior_logprobs: list[Tensor], reference_logprobs: list[Tensor], kl_coef: Tensor | float
) -> Tensor:
    """The reward `r - kl_coef · log (π(y | x) / π_ref(y | x))` a sample, `[N]` float32: 1909.08593 eq. 2.

    `reward`: `[N]`, finite. `behavior_logprobs`, `reference_logprobs`: `[T_i]` each, of the policy when it sampled and
    of the reference. `kl_coef`: a number, or one a sample `[N]`. Raises `ShapeError`.

    >>> penalized_reward(torch.tensor([1.0]), [torch.tensor([-1.0, -1.0])], [torch.tensor([-2.0, -1.5])], 0.5)
    tensor([0.2500])
    """
    reward_N, kl_N = finite_rewards(reward), response_kl(behavior_logprobs, reference_logprobs)
    same_shape(kl_N, "behavior_logprobs' rows", reward=reward_N)
    return (reward_N - kl_coef * kl_N).float()


def response_kl(behavior_logprobs: list[Tensor], reference_logprobs: list[Tensor]) -> Tensor:
    """The k1 of each response, the sum of its tokens' log-ratios: `[N]` float64, in nats; its mean is an unbiased
    estimate of KL(π || π_ref). Log-ratios of tokens are clamped to ±20. Raises `ShapeError`."""
    if len(behavior_logprobs) != len(reference_logprobs):
        raise ShapeError(
            f"reference_logprobs has {len(reference_logprobs)} rows; expected {len(behavior_logprobs)}, as many as "
            "behavior_logprobs."
        )
    pairs = zip(behavior_logprobs, reference_logprobs, strict=True)
    sums = [float(kl_estimate(own, reference, "k1").double().sum()) for own, reference in pairs]
    return torch.tensor(sums, dtype=torch.float64)


def next_coefficient(
    behavior_logprobs: list[Tensor], reference_logprobs: list[Tensor], *, state: AdaptiveKl
) -> tuple[Tensor, AdaptiveKl]:
    """The step's coefficient for each of its samples, `[N]` float32, and the state of the next step, which has seen how
    far this step's responses are from the reference. Raises `ShapeError`."""
    kl_N = response_kl(behavior_logprobs, reference_logprobs)
    return torch.full((len(kl_N),), state.coef), state.after(float(kl_N.mean()))


def add_adaptive_coefficient(flow: Dataflow, *, coef: float, target: float, gain: float) -> Dataflow:
    """Add the stage that writes `kl_coef`, from `coef` on. Comes after the reference."""
    reads = ["behavior_logprobs", "reference_logprobs"]
    state = AdaptiveKl(coef, target, gain)
    return flow.compute(next_coefficient, per="batch", reads=reads, writes=[KL_COEF], state=state)
