"""Critic-free policy gradients: sample, reward, compare, push. One dataflow; the methods are its presets.

    source ─▶ rollout ─▶ reward ─▶ (overlong_reward) ─▶ (penalized_reward) ─▶ advantage ─▶ train
                 │          └────▶ (has_signal, drops groups without) ───────────────────────┤
                 ├─▶ (reference, with kl_coef) ─▶ the loss, or penalized_reward (kl_in) ─────┤
                 │                └─▶ (next_coefficient, with kl_target) ─▶ penalized_reward │
                 └─▶ (staleness, with proximal=interpolated) ────────────────────────────────┘
    remax:       greedy_rollout ─▶ greedy_reward ─▶ advantage

The methods differ in names and settings, which `conf/algorithms.py` has: all open to `algorithm.KEY=…`.

Rewards, and groups, are shaped before there is an advantage. A KL penalty in the reward of whole responses has a
coefficient that is fixed, or follows a target from step to step:

    reference ─ reference_logprobs ─┬─▶ penalized_reward ─▶ advantage …
                                    └─▶ next_coefficient ─ kl_coef ─▶ ▲        per batch, with kl_target

With a fixed coefficient there is one stage, and it needs no batch; an adaptive one is a state of the trainers
(`Dataflow.compute(state=…)`), so that what reads it is per batch.

Legend: G samples of one group (the same prompt); N samples of a unit; T_i response tokens of sample i.
"""

from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from penstock.algorithms.advantages import ADVANTAGES, finite_rewards
from penstock.algorithms.checks import non_negative, same_shape
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import ParameterAlias, columns_read
from penstock.algorithms.kl import AdaptiveKl, kl_estimate
from penstock.algorithms.losses import SURROGATES, interpolated_policy_loss, policy_loss, with_entropy_bonus
from penstock.algorithms.registry import ALGORITHMS, Algorithm, algorithm, checked_options
from penstock.conf.algorithms import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GspoConfig,
    PolicyGradientConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
)
from penstock.conf.checks import above
from penstock.conf.errors import ConfigError, DataflowError, ShapeError

SHAPED, PENALIZED = Column("shaped_reward", "float32"), Column("penalized_reward", "float32")
TOKEN_ADVANTAGE = Column("token_advantage", "float32", "token")
PRESETS = (DrGrpoConfig, DapoConfig, RlooConfig, ReinforcePpConfig, RemaxConfig, GspoConfig, CispoConfig)
STATE = "state"
"""The keyword of what an advantage carries from step to step. Its class is the annotation, and makes the first one."""
TURNS = "turn_tokens"
"""The column of turns. An advantage that reads it has one value for each token."""


@algorithm("policy_gradient")
def policy_gradient(cfg: PolicyGradientConfig) -> Dataflow:
    """Any advantage, surrogate and correction that the configuration names."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    if cfg.drop_uniform_groups:
        flow.filter(has_signal, reads=["reward"], reason="no_signal")
    if cfg.kl_coef:
        flow.logprobs("reference")
    column = _add_advantage(flow, cfg, _add_shaping(flow, cfg))
    if cfg.proximal == "interpolated":
        flow.staleness()
    loss = _loss(cfg)
    return flow.train("policy", loss=loss if column == "advantage" else ParameterAlias(loss, "advantage", column))


def _add_shaping(flow: Dataflow, cfg: PolicyGradientConfig) -> str:
    """Add the shaping of the reward. Returns the column that the advantage is made from."""
    reward = "reward"
    if cfg.overlong_tokens:
        shape = partial(
            overlong_reward, limit=cfg.overlong_limit, buffer=cfg.overlong_tokens, penalty=cfg.overlong_penalty
        )
        flow.compute(shape, per="sample", reads=[reward, "response_ids"], writes=[SHAPED])
        reward = SHAPED.name
    if not (cfg.kl_coef and cfg.kl_in == "reward"):
        return reward
    penalize: Any = ParameterAlias(penalized_reward, "reward", reward)
    if cfg.kl_target:
        add_adaptive_coefficient(flow, coef=cfg.kl_coef, target=cfg.kl_target, gain=cfg.kl_gain)
    else:
        penalize = partial(penalize, kl_coef=cfg.kl_coef)
    per = "batch" if cfg.kl_target else "sample"
    flow.compute(penalize, per=per, reads=columns_read(penalize), writes=[PENALIZED])
    return PENALIZED.name


def _add_advantage(flow: Dataflow, cfg: PolicyGradientConfig, reward: str) -> str:
    """Add the advantage. Returns the column that it writes: of whole responses, or of tokens if it is told of turns."""
    function = ADVANTAGES.find(cfg.advantage)
    options = checked_options(function, cfg.advantage_options, "algorithm.advantage_options")
    advantage: Any = partial(function, **options)
    if reward != "reward":
        advantage = ParameterAlias(advantage, "reward", reward)
    wanted = columns_read(advantage)
    state = _first_state(function, cfg.advantage) if STATE in wanted else None
    reads = [name for name in wanted if name != STATE]
    if "greedy_reward" in reads:
        flow.greedy_rollout("policy")
        flow.reward(writes="greedy_reward", text="greedy_text", name="greedy_reward")
    written = TOKEN_ADVANTAGE if TURNS in reads else STANDARD_COLUMNS["advantage"]
    flow.compute(advantage, per=cfg.advantage_per, reads=reads, writes=[written], name="advantage", state=state)
    return written.name


def _first_state(function: Any, name: str) -> Any:
    kind = get_type_hints(function).get(STATE)
    if kind is None:
        raise DataflowError(
            f"algorithm.advantage={name}: annotate its parameter state with the class, which makes the first one."
        )
    return kind()


def _loss(cfg: PolicyGradientConfig) -> Any:
    surrogate, correction = SURROGATES.find(cfg.surrogate), CORRECTIONS.find(cfg.correction)
    if cfg.aggregation == "constant":
        above("algorithm.constant_tokens", cfg.constant_tokens, 0)  # a run has put its longest response there
    constant = cfg.constant_tokens or 1.0
    loss = partial(
        interpolated_policy_loss if cfg.proximal == "interpolated" else policy_loss,
        surrogate=surrogate,
        surrogate_options=checked_options(surrogate, cfg.surrogate_options, "algorithm.surrogate_options"),
        correction=correction,
        correction_options=checked_options(correction, cfg.correction_options, "algorithm.correction_options"),
        kl_coef=cfg.kl_coef if cfg.kl_in == "loss" else 0.0,
        kl_estimator=cfg.kl_estimator,
        aggregation=cfg.aggregation,
        constant=constant,
    )
    if not cfg.entropy_coef:
        return loss
    return with_entropy_bonus(loss, coef=cfg.entropy_coef, aggregation=cfg.aggregation, constant=constant)


ALGORITHMS.update({config.name: Algorithm(config.name, policy_gradient, config) for config in PRESETS})


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
