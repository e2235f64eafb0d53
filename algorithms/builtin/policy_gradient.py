"""Critic-free policy gradients: sample, reward, compare, push. One dataflow; the methods are its presets.

    source ─▶ rollout ─▶ reward ─▶ (overlong_reward) ─▶ (penalized_reward) ─▶ advantage ─▶ train
                 │          └────▶ (has_signal, drops groups without) ───────────────────────┤
                 ├─▶ (reference, with kl_coef) ─▶ the loss, or penalized_reward (kl_in) ─────┤
                 │                └─▶ (next_coefficient, with kl_target) ─▶ penalized_reward │
                 └─▶ (staleness, with proximal=interpolated) ────────────────────────────────┘
    remax:       greedy_rollout ─▶ greedy_reward ─▶ advantage

The methods differ in names and settings, which `conf/algorithms.py` has: all open to `algorithm.KEY=…`.
"""

from functools import partial
from typing import Any, get_type_hints

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Renamed, columns_read
from penstock.algorithms.losses import SURROGATES, interpolated_policy_loss, policy_loss, with_entropy_bonus
from penstock.algorithms.named import checked_options
from penstock.algorithms.registry import ALGORITHMS, Algorithm, algorithm
from penstock.algorithms.shaping import add_adaptive_coefficient, has_signal, overlong_reward, penalized_reward
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
from penstock.conf.errors import DataflowError

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
    return flow.train("policy", loss=loss if column == "advantage" else Renamed(loss, "advantage", column))


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
    penalize: Any = Renamed(penalized_reward, "reward", reward)
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
        advantage = Renamed(advantage, "reward", reward)
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
