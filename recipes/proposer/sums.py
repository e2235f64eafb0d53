"""Sums that one policy makes for another, which learns them: `proposer` is paid for sums that `solver` gets right as
often as wrong."""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from penstock import (
    AlgorithmConfig,
    Column,
    Context,
    Dataflow,
    LossInputs,
    LossOutput,
    Task,
    algorithm,
    truncated_importance_weight,
)

SUM = re.compile(r"([1-9]\d?)\+([1-9]\d?)")
ASK = "sum?"


@dataclass
class ProposerConfig(AlgorithmConfig):
    name: str = "proposer"
    group_size: int = 8
    entropy_bonus: float = 0.1
    """Weight of the proposer's entropy, nats a token."""


def answers_against_each_other(turn_rewards: list[Tensor], turn_tokens: list[Tensor]) -> list[Tensor]:
    """The advantage of each token of the solver, `[T_i]`: its answer against the attempt's others, which are to the
    same sum."""
    return [
        (rewards - rewards.mean()).repeat_interleave(tokens.long())
        for rewards, tokens in zip(turn_rewards, turn_tokens, strict=True)
    ]


def sums_against_each_other(reward: Tensor, turn_tokens: list[Tensor]) -> list[Tensor]:
    """The advantage of each token of the proposer, `[T_i]`: its sum against the others of the group."""
    advantages = (reward - reward.mean()) / (reward.std(correction=0) + 1e-6)
    return [value.repeat(int(tokens.sum())) for value, tokens in zip(advantages, turn_tokens, strict=True)]


def push(inputs: LossInputs, token_advantage: Tensor) -> LossOutput:
    """The loss `-w A log π` of each token, `[B, T]`."""
    weight = truncated_importance_weight(inputs.logprobs, inputs.behavior_logprobs, cap=2.0)
    loss = -weight * token_advantage * inputs.logprobs
    return LossOutput(loss, {"pg_loss": loss})


def push_and_explore(inputs: LossInputs, token_advantage: Tensor, entropy: Tensor, *, bonus: float) -> LossOutput:
    """The loss of the proposer, `-w A log π - bonus H` of each token, `[B, T]`: or it makes the same sums for ever."""
    pushed = push(inputs, token_advantage)
    return LossOutput(pushed.loss - bonus * entropy, pushed.metrics)


@algorithm("proposer")
def proposer(cfg: ProposerConfig) -> Dataflow:
    flow = Dataflow().rollout("solver", samples_per_prompt=cfg.group_size).reward()
    flow.compute(
        {"solver": answers_against_each_other, "proposer": sums_against_each_other},
        per="group",
        reads=["reward", "turn_rewards", "turn_tokens"],
        writes=[Column("token_advantage", "float32", "token")],
        name="advantage",
    )
    flow.train("solver", loss=push)
    return flow.train("proposer", loss=partial(push_and_explore, bonus=cfg.entropy_bonus))


class Sums:
    def __init__(self, propose: bool = True, answers: int = 8) -> None:
        """`propose`: the policy makes the sums. False: they are the task's. `answers`: to each sum."""
        self.propose, self.answers = propose, answers

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        for index in itertools.count():
            yield Task(str(index), index, {"a": draws.randint(10, 99), "b": draws.randint(10, 99)})

    async def run(self, task: Task, ctx: Context) -> None:
        if self.propose:
            await self._propose(ctx)
            return
        a, b = task.data["a"], task.data["b"]
        turn = await ctx.sample([{"role": "user", "content": f"{a}+{b}"}], policy="solver")
        ctx.reward(float(turn.answer == str(a + b)), policy="solver")

    async def _propose(self, ctx: Context) -> None:
        proposal = await ctx.sample([{"role": "user", "content": ASK}], policy="proposer")
        terms = SUM.fullmatch(proposal.answer)
        if not terms:
            ctx.reward(0.0, policy="proposer")
            return
        asked = [{"role": "user", "content": proposal.answer}]
        turns = await asyncio.gather(*[ctx.sample(asked, policy="solver") for _ in range(self.answers)])
        right = [float(turn.answer == str(int(terms[1]) + int(terms[2]))) for turn in turns]
        for turn, value in zip(turns, right, strict=True):
            ctx.reward(value, turn=turn)
        share = sum(right) / len(right)
        ctx.reward(4 * share * (1 - share), turn=proposal)
