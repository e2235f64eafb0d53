"""The algorithm of `declarative.py` as a `for` loop over the handles. Run it, with any override of the recipe:

    python recipes/custom_algorithm/imperative.py trainer.max_steps=5

Every call waits for its result, so this is plain synchronous training; `penstock run` of the declarative form streams
and may run asynchronously.
"""

import sys
from functools import partial

import numpy as np
import torch

import penstock
from penstock import BatchTotals, aggregate, truncated_importance_weight


def leave_one_out(rows: penstock.Rows) -> np.ndarray:
    """Advantages `[rows]` float32: each reward less the mean of the others of its group (2402.14740)."""
    reward: np.ndarray = rows["reward"]
    advantage = np.zeros_like(reward)
    for _, members in rows.groups():
        others = max(len(members) - 1, 1)
        advantage[members] = reward[members] - (reward[members].sum() - reward[members]) / others
    return advantage


def asymmetric_loss(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    totals: BatchTotals,
    advantage: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    *,
    negative_weight: float = 0.5,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss `-w A log π`, negative A scaled down; the shapes are explained in `declarative.py`."""
    push = torch.where(advantage > 0, advantage, negative_weight * advantage)[:, None]
    weight = truncated_importance_weight(logprobs, behavior_logprobs, cap=2.0)
    loss = aggregate(-weight * push * logprobs, mask, totals, "token_mean")
    return loss, {"pg_loss": loss.detach()}


def main(overrides: list[str]) -> None:
    config = penstock.load_config(["recipe=custom_algorithm", *overrides])
    loss = partial(asymmetric_loss, negative_weight=config.algorithm.negative_weight)  # type: ignore[attr-defined]
    with penstock.session(config) as run:
        for step in range(1, config.trainer.max_steps + 1):
            prompts = run.prompts.next(config.trainer.groups_per_step)
            rows = run.policy.generate(prompts, n=config.algorithm.group_size)
            rows = rows.with_column("reward", run.reward(rows))
            rows = rows.select(np.flatnonzero(np.isfinite(rows["reward"])))  # a failed reward costs its sample
            rows = rows.with_column("advantage", leave_one_out(rows))
            metrics = run.policy.update(rows, loss)
            run.policy.publish()
            metrics["reward/mean"] = float(rows["reward"].mean())
            run.log(step, metrics)
            print(f"step {step}: reward {metrics['reward/mean']:.3f}, loss {metrics['actor/pg_loss']:+.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
