"""Held-out accuracy: greedy decoding of problems that are never trained on, scored by the run's own reward.

Held by the controller, which calls it between two publications: the engines serve exactly one version meanwhile.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.faults.causes import is_recoverable
from penstock.orchestrator.fleet.fleet import Fleet
from penstock.orchestrator.ray_calls import answer, answers
from penstock.workers.prompts.opening import open_source
from penstock.workers.protocols import Sampling

CORRECT = 1.0
"""A response counts as right when its reward is at least this: partial credit is none."""
TRIES = 3
"""Of an evaluation whose actors die."""


@dataclass(frozen=True)
class HeldOut:
    """The problems, tokenised once."""

    prompts: list[list[int]]
    tasks: list[str]

    @classmethod
    def of(cls, config: RunConfig, model_path: str) -> "HeldOut":
        """Reads at most `evaluation.num_problems`. Raises `DataError` if the held-out set cannot be read."""
        source = open_source(config, model_path, held_out=True)
        groups = source.next_groups(min(config.evaluation.num_problems, len(source.dataset)))
        return cls([list(group["prompt_ids"]) for group in groups], [str(group["task"]) for group in groups])


class Evaluator:
    """Spreads the problems over the engines and returns the share answered right."""

    def __init__(self, held_out: HeldOut, config: RunConfig) -> None:
        self._held_out = held_out
        self._sampling = Sampling.of(config.rollout.sampling).greedy()
        self._timeout_s = config.rollout.generate_timeout_s

    async def accuracy(self, fleet: Fleet) -> float:
        """In [0, 1]. A response whose reward fails counts as wrong. Where an actor dies meanwhile, all problems are
        given to those that are there then."""
        for _ in range(TRIES - 1):
            try:
                return await self._accuracy(fleet)
            except PenstockError as error:
                if not is_recoverable(error):
                    raise
        return await self._accuracy(fleet)

    async def _accuracy(self, fleet: Fleet) -> float:
        """Responses of an engine go to one reward actor."""
        rollouts = await fleet.present("rollout")
        rewards = await fleet.present("reward", fleet.first_stage("reward"))
        shares = [range(index, len(self._held_out.prompts), len(rollouts)) for index in range(len(rollouts))]
        parts = await asyncio.gather(
            *(
                self._score(rollout, rewards[index % len(rewards)], share)
                for index, (rollout, share) in enumerate(zip(rollouts, shares, strict=True))
                if len(share)
            )
        )
        return sum(parts) / max(1, len(self._held_out.prompts))

    async def _score(self, rollout: tuple[str, Any], reward: tuple[str, Any], share: range) -> int:
        prompts = [self._held_out.prompts[index] for index in share]
        call = rollout[1].generate.remote(prompts, 1, [self._sampling] * len(prompts))
        groups = (await answers([(rollout[0], call)], phase="evaluation", timeout_s=self._timeout_s))[0]
        tasks, texts = [self._held_out.tasks[index] for index in share], [group[0].text for group in groups]
        score = reward[1].score.remote(tasks, texts)
        scores = await answer(score, name=reward[0], phase="evaluation", timeout_s=self._timeout_s)
        return sum(1 for value in scores if isinstance(value, float) and value >= CORRECT)
