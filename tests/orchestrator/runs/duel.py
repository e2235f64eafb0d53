"""An environment in which two policies speak: one names things, and the other answers to what it has heard of that."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from penstock import AlgorithmConfig, algorithm
from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import ppo_clip_loss
from penstock.workers.agents.environment import Task
from tests.orchestrator.runs.digits_game import share_of_digits


class Duel:
    def tasks(self, seed: int) -> Iterator[Task]:
        return (Task(str(index), index, {"number": seed + index * index}) for index in range(64))

    async def run(self, task: Task, ctx: Any) -> None:
        asked = [{"role": "user", "content": f"{task.data['number']} is a number"}]
        first = await ctx.sample(asked, policy="proposer")
        share = share_of_digits(first.message["content"])
        second = await ctx.sample([{"role": "user", "content": f"{share:.2f} of it"}])
        ctx.reward(share, first)
        ctx.reward(share_of_digits(second.message["content"]) - share, policy="solver")


def both(group_size: int) -> Dataflow:
    flow = Dataflow().rollout("solver", samples_per_prompt=group_size).reward()
    flow.compute(group_advantage, per="group", reads=["reward"], writes=["advantage"])
    flow.train("solver", loss=ppo_clip_loss)
    return flow.train("proposer", loss=partial(ppo_clip_loss, clip_high=0.3))


@algorithm("two_policies")
def two_policies(cfg: AlgorithmConfig) -> Dataflow:
    return both(cfg.group_size)
