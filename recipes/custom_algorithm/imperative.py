"""The algorithm of `declarative.py`, its advantage and its loss, in a `for` loop over the handles. Run
it, with any override of the recipe:

    python recipes/custom_algorithm/imperative.py trainer.max_steps=5

Every call waits for its result, so this is plain synchronous training; `penstock run` of the declarative form streams
and may run asynchronously.
"""

import sys
from functools import partial

import numpy as np

import penstock
from penstock.recipes.custom_algorithm.declarative import AsymmetricConfig, asymmetric_loss, leave_one_out


def main(overrides: list[str]) -> None:
    config = penstock.load_config(["recipe=custom_algorithm", *overrides], algorithm=AsymmetricConfig)
    loss = partial(asymmetric_loss, negative_weight=config.algorithm.negative_weight)
    with penstock.session(config) as run:
        for step in range(1, config.trainer.max_steps + 1):
            prompts = run.prompts.next(config.trainer.groups_per_step)
            rows = run.policy.generate(prompts, n=config.algorithm.group_size)
            rows = rows.with_column("reward", run.reward(rows))
            rows = rows.with_column("advantage", rows.per_group(leave_one_out, "reward"))
            metrics = run.policy.update(rows, loss)  # without the samples whose reward failed
            run.policy.publish()
            metrics["reward/mean"] = float(np.nanmean(rows["reward"]))
            run.log(step, metrics)
            print(f"step {step}: reward {metrics['reward/mean']:.3f}, loss {metrics['actor/pg_loss']:+.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
