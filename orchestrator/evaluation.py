"""Held-out accuracy: responses to problems that are never trained on, greedy and sampled, scored by the run's own
reward.

Held by the controller, which calls it between two publications: the engines serve exactly one version meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.faults.causes import is_recoverable
from penstock.orchestrator.fleet.fleet import Fleet
from penstock.orchestrator.ray_calls import answer, answers
from penstock.workers.prompts.opening import open_source
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.worker import sample_seed

CORRECT = 1.0
"""A response counts as right when its reward is at least this: partial credit is none."""
ITSELF = "heldout"
"""The set of problems that evaluation has without a name."""
HELDOUT = f"accuracy/{ITSELF}"
"""Of the greedy responses to it."""
TRIES = 3
"""Of an evaluation whose actors die."""


Scores = Sequence[float | None]
"""Of the responses to one problem; None: it has none, which counts as wrong."""


@dataclass(frozen=True)
class HeldOut:
    """The problems, tokenised once."""

    prompts: list[list[int]]
    """None in an environment."""
    tasks: list[str]

    @classmethod
    def of(cls, config: RunConfig, model_path: str, name: str | None = None) -> "HeldOut":
        """Those of evaluation itself, or of one of its `sets`. Reads at most `num_problems`. Raises `DataError` if they
        cannot be read."""
        if name is not None:
            config = config.with_set(name)
        rows_are = "tasks" if config.environment.name is not None else "prompts"
        source = open_source(config, model_path, held_out=True, rows_are=rows_are)
        groups = source.next_groups(min(config.evaluation.num_problems, len(source.dataset)))
        prompts = [list(group["prompt_ids"]) for group in groups if "prompt_ids" in group]
        return cls(prompts, [str(group["task"]) for group in groups])


class Evaluator:
    """Spreads the problems over the engines, and counts the responses that are right."""

    def __init__(self, sets: Mapping[str, HeldOut], config: RunConfig) -> None:
        """`sets`: by name; `heldout` is that of evaluation itself."""
        self._sets = sets
        self._sampling = Sampling.of(config.rollout.sampling)
        self._num_samples, self._seed = config.evaluation.num_samples, config.evaluation.seed
        self._timeout_s = config.rollout.generate_timeout_s

    @classmethod
    def of(cls, config: RunConfig, model_path: str) -> "Evaluator":
        """Of all sets of a run. Raises `DataError`."""
        sets = {name: HeldOut.of(config, model_path, name) for name in config.evaluation.sets}
        kind = EnvironmentEvaluator if config.environment.name is not None else cls
        return kind({ITSELF: HeldOut.of(config, model_path), **sets}, config)

    async def measure(self, fleet: Fleet) -> dict[str, float]:
        """Metrics, each in [0, 1]. A response whose reward fails counts as wrong. Where an actor dies meanwhile, all
        problems are given to those that are there then."""
        found: dict[str, float] = {}
        for name, held_out in self._sets.items():
            found |= await self._tried(fleet, name, held_out)
        return found

    async def _tried(self, fleet: Fleet, name: str, held_out: HeldOut) -> dict[str, float]:
        for _ in range(TRIES - 1):
            try:
                return await self._measure(fleet, name, held_out)
            except PenstockError as error:
                if not is_recoverable(error):
                    raise
        return await self._measure(fleet, name, held_out)

    async def _measure(self, fleet: Fleet, name: str, held_out: HeldOut) -> dict[str, float]:
        problems, metric = range(len(held_out.tasks)), f"accuracy/{name}"
        greedy = [self._sampling.greedy()] * len(problems)
        scores = await self._scores(fleet, held_out, 1, greedy)
        found = {metric: _share(_right(scores))} | self._more(name, scores)
        if k := self._num_samples:
            samplings = [self._sampling.seeded(sample_seed(self._seed, problem)) for problem in problems]
            right = _right(await self._scores(fleet, held_out, k, samplings))
            found |= {f"{metric}_avg@{k}": _share(right) / k, f"{metric}_pass@{k}": _share([n > 0 for n in right])}
        return found

    def _more(self, name: str, scores: Sequence[Scores]) -> dict[str, float]:
        """Further metrics of greedy responses."""
        return {}

    async def _scores(
        self, fleet: Fleet, held_out: HeldOut, num_samples: int, samplings: Sequence[Sampling]
    ) -> list[Scores]:
        """Of each problem, those of so many responses. Those of an engine go to one reward actor."""
        rollouts = await fleet.present("rollout")
        rewards = await fleet.present("reward", fleet.first_stage("reward"))
        shares = [range(index, len(samplings), len(rollouts)) for index in range(len(rollouts))]
        parts = await asyncio.gather(
            *(
                self._score(rollout, rewards[index % len(rewards)], held_out, share, num_samples, samplings)
                for index, (rollout, share) in enumerate(zip(rollouts, shares, strict=True))
            )
        )
        scores: list[Scores] = [()] * len(samplings)
        for share, part in zip(shares, parts, strict=True):
            scores[share.start :: len(rollouts)] = part
        return scores

    async def _score(
        self,
        rollout: tuple[str, Any],
        reward: tuple[str, Any],
        held_out: HeldOut,
        share: range,
        num_samples: int,
        samplings: Sequence[Sampling],
    ) -> list[Scores]:
        if not share:
            return []
        prompts = [held_out.prompts[index] for index in share]
        call = rollout[1].generate.remote(prompts, num_samples, [samplings[index] for index in share])
        groups = (await answers([(rollout[0], call)], phase="evaluation", timeout_s=self._timeout_s))[0]
        tasks = [held_out.tasks[index] for index in share for _ in range(num_samples)]
        texts = [completion.text for group in groups for completion in group]
        score = reward[1].score.remote(tasks, texts)
        scores = await answer(score, name=reward[0], phase="evaluation", timeout_s=self._timeout_s)
        values = [value if isinstance(value, float) else None for value in scores]
        return [values[first : first + num_samples] for first in range(0, len(texts), num_samples)]


class EnvironmentEvaluator(Evaluator):
    """The same in an environment: attempts in the place of responses, and the reward that they are given."""

    async def _scores(
        self, fleet: Fleet, held_out: HeldOut, num_samples: int, samplings: Sequence[Sampling]
    ) -> list[Scores]:
        players = await fleet.present("environment")
        engines = await fleet.present("rollout")
        tasks = [task for task in held_out.tasks for _ in range(num_samples)]
        each = [
            sampling if sampling.seed is None else sampling.seeded(sampling.seed + index)
            for sampling in samplings
            for index in range(num_samples)
        ]
        calls = []
        for index, (name, handle) in enumerate(players):
            share = slice(index, None, len(players))
            calls.append((name, handle.play.remote(engines, tasks[share], each[share])))
        parts = await answers(calls, phase="evaluation", timeout_s=self._timeout_s)
        rewards: list[float | None] = [None] * len(tasks)
        for index, part in enumerate(parts):
            rewards[index :: len(players)] = part
        return [rewards[first : first + num_samples] for first in range(0, len(tasks), num_samples)]

    def _more(self, name: str, scores: Sequence[Scores]) -> dict[str, float]:
        """The mean reward, of those that have one: an environment's may be more than right or wrong."""
        known = [score for of_one in scores for score in of_one if score is not None]
        return {f"heldout_reward/{name}": sum(known) / len(known)} if known else {}


def _right(scores: Sequence[Scores]) -> list[int]:
    """Of each problem, how many responses are."""
    return [sum(score is not None and score >= CORRECT for score in of_one) for of_one in scores]


def _share(counts: Sequence[int]) -> float:
    return sum(counts) / max(1, len(counts))
