"""A KL penalty in the reward of whole responses, and a coefficient that follows a target from step to step.

    reference ─ reference_logprobs ─┬─▶ penalized_reward ─▶ advantage …
                                    └─▶ next_coefficient ─ kl_coef ─▶ ▲        per batch, with kl_target

The stages are added by `policy_gradient.py` and `ppo.py`. With a fixed coefficient there is one, and it needs no
batch; an adaptive one is a state of the trainers (`Dataflow.compute(state=…)`), so that what reads it is per batch.

Legend: N samples of a unit; T_i response tokens of sample i.
"""

import torch
from torch import Tensor

from penstock.algorithms.advantages import finite_rewards
from penstock.algorithms.checks import same_shape
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.kl import AdaptiveKl, kl_estimate
from penstock.conf.errors import ShapeError

KL_COEF = Column("kl_coef", "float32")


def penalized_reward(
    reward: Tensor,
    behavior_logprobs: list[Tensor],
    reference_logprobs: list[Tensor],
    kl_coef: Tensor | float,
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


def follow_target(flow: Dataflow, *, coef: float, target: float, gain: float) -> Dataflow:
    """Add the stage that writes `kl_coef`, from `coef` on. Comes after the reference."""
    reads = ["behavior_logprobs", "reference_logprobs"]
    state = AdaptiveKl(coef, target, gain)
    return flow.compute(next_coefficient, per="batch", reads=reads, writes=[KL_COEF], state=state)
