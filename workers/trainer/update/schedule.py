"""The learning rate of each update, which all its optimizer steps share. Pure."""

import math

from penstock.conf.trainer import OptimizerConfig


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
