"""AdamW as every engine has it: how it is made, its states, the numbers of each step, and the learning rate of each
update, which all its optimizer steps share.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from penstock.conf.trainer import OptimizerConfig
from penstock.workers.calls.training_calls import AdamParams

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Make AdamW. Parameters of one mesh go together, since an operation on several DTensors wants them all on the
    same."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": some} for some in by_mesh.values()],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def moments_of(optimizer: torch.optim.AdamW, tensor: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a tensor that it steps. AdamW makes it at its first step; it is made here if asked for
    before."""
    state: dict[str, Tensor] = optimizer.state[tensor]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(tensor)
    return state


def step_params(config: OptimizerConfig, rate: float) -> AdamParams:
    """Numbers of a step as configured, at this learning rate."""
    beta1, beta2 = config.betas
    return AdamParams(rate, beta1, beta2, config.eps, config.weight_decay, config.clip_norm)


def set_params(optimizer: torch.optim.AdamW, params: AdamParams) -> None:
    """Have the next step take these numbers; the norm of clipping is the engine's."""
    for param_group in optimizer.param_groups:
        param_group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }


def num_steps(optimizer: torch.optim.AdamW | None) -> int:
    """Number of steps so far, which the bias correction counts."""
    assert optimizer is not None
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def set_num_steps(optimizer: torch.optim.AdamW | None, count: int) -> None:
    assert optimizer is not None
    for state in optimizer.state.values():
        state["step"].fill_(count)


def learning_rate(config: OptimizerConfig, update: int, max_steps: int) -> float:
    """Rate of an update, counted from 0.

    Warm-up: `lr · (update + 1) / warmup_steps` for the first `warmup_steps`, so that none is lost at rate 0. Then
    constant, or half a cosine from `lr` down to `lr · min_lr_share` at `max_steps`, and level from there.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (update - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    share = config.min_lr_share + (1.0 - config.min_lr_share) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * share
