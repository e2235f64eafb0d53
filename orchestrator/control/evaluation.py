"""Held-out accuracy: responses to problems that are never trained on, greedy and sampled, scored by the run's own
reward.

The controller evaluates between two publications: the engines serve exactly one version meanwhile.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.reward import ENVIRONMENT_REWARD
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, answers_or_end, deal, is_recoverable, undeal
from penstock.workers.agents.attempts import AttemptResult
from penstock.workers.agents.trajectory import REJECTED
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts.opening import open_source
from penstock.workers.protocols import Sampling
from penstock.workers.reward.reward_result import RewardResult
from penstock.workers.reward.signatures import Response
from penstock.workers.rollout.rollout_worker import sample_seed
from penstock.workers.runtime.async_tasks import cancel_all

ITSELF = "heldout"
"""Name of the set of problems of evaluation itself."""
HELDOUT = f"accuracy/{ITSELF}"
"""Metric: the accuracy of the greedy responses to it."""
TRIES = 3
"""Number of tries of an evaluation whose actors die."""


@dataclass(frozen=True)
class Score:
    """The score of a response."""

    first: float
    """The reward that says whether it is right: the first of `rewards`. A `Reward` may say it by its accuracy."""
    total: float
    """The reward that is trained on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The environment's rewards of the policies that spoke, where several are trained."""
    is_silent: bool = False
    """The policy of `flow.rollout` said nothing: `rewards` alone count."""

    def right(self, least: float) -> float:
        """How right the response is, from 0 to 1: its accuracy, or whether the reward is at least `least`."""
        accuracy = getattr(self.first, "accuracy", None)
        return float(self.first >= least) if accuracy is None else float(accuracy)


Scores = Sequence[Score | None]
"""Scores of the responses to one problem that count; None: a response without a score, which counts as wrong."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems, tokenised once."""

    prompts: list[list[int]]
    """Prompts of the problems; empty in an environment."""
    tasks: list[str]
    pictures: list[PromptPictures | None] = field(default_factory=list)
    """Pictures of the prompts, or of the tasks; empty in a run of text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the set changes of the environment's options."""

    @classmethod
    def of(
        cls, config: RunConfig, model_path: str, name: str | None = None, *, needs_answer: bool = False
    ) -> "HeldOut":
        """Read the problems of evaluation itself, or of one of its `sets`, at most `num_problems`. `needs_answer`: the
        reward needs their answers. Raises `DataError` if they cannot be read."""
        options, own = config.environment_changes(name), config.with_held_out(name)
        rows_are = "tasks" if own.environment.name is not None else "prompts"
        source = open_source(own, model_path, held_out=True, rows_are=rows_are, needs_answer=needs_answer)
        groups = source.next_groups(min(own.evaluation.num_problems, len(source.dataset)))
        prompts = [list(group["prompt_ids"]) for group in groups if "prompt_ids" in group]
        pictures = list(map(PromptPictures.of, groups)) if config.rollout.max_pictures else []
        return cls(prompts, [str(group["task"]) for group in groups], pictures, options)


class Evaluator:
    """Spreads the problems over the engines, and counts the responses that are right."""

    def __init__(self, sets: Mapping[str, HeldOut], config: RunConfig) -> None:
        """`sets`: the problems by name; `heldout` is the set of evaluation itself."""
        self._sets = sets
        self._sampling = Sampling.of(config.rollout.sampling)
        self._num_samples, self._seed = config.evaluation.num_samples, config.evaluation.seed
        self._right_at = config.evaluation.right_at
        self._timeout_s, self._num_engines = config.rollout.generate_timeout_s, config.rollout.least_workers

    @classmethod
    def of(cls, config: RunConfig, model_path: str, *, needs_answer: bool = False) -> "Evaluator":
        """The evaluator of all sets of a run. Arguments as of `HeldOut.of`. Raises `DataError`."""
        read = partial(HeldOut.of, config, model_path, needs_answer=needs_answer)
        sets = {name: read(name) for name in config.evaluation.sets}
        kind = EnvironmentEvaluator if config.environment.name is not None else cls
        return kind({ITSELF: read(), **sets}, config)

    async def measure(self, fleet: Fleet) -> dict[str, float]:
        """Measure. Returns metrics, each in [0, 1]. A response whose reward fails counts as wrong. Where an actor dies
        meanwhile, all problems are given to those that are there then."""
        found: dict[str, float] = {}
        for name, held_out in self._sets.items():
            found |= await self._measure_set(fleet, name, held_out)
        return found

    async def _measure_set(self, fleet: Fleet, name: str, held_out: HeldOut) -> dict[str, float]:
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
        found = {metric: _mean(chain(*self._right(scores)))} | self._more(name, scores)
        if k := self._num_samples:
            samplings = [self._sampling.seeded(sample_seed(self._seed, problem)) for problem in problems]
            right = self._right(await self._scores(fleet, held_out, k, samplings))
            found[f"{metric}_avg@{k}"] = _mean(chain(*right))
            found[f"{metric}_pass@{k}"] = _mean(max(of_one) for of_one in right if of_one)
        return found

    def _num_portions(self, engines: Sequence[object]) -> int:
        """How many times as much each engine has to do as if all of the run evaluated."""
        return max(1, math.ceil(self._num_engines / len(engines)))

    def _right(self, scores: Sequence[Scores]) -> list[list[float]]:
        """How right each response is that the policy gave, by problem; one without a score is wrong."""
        return [
            [0.0 if score is None else score.right(self._right_at) for score in of_one if not _is_silent(score)]
            for of_one in scores
        ]

    def _more(self, name: str, scores: Sequence[Scores]) -> dict[str, float]:
        """Further metrics of greedy responses."""
        return {}

    async def _scores(
        self, fleet: Fleet, held_out: HeldOut, num_samples: int, samplings: Sequence[Sampling]
    ) -> list[Scores]:
        """Scores of `num_samples` responses to each problem. Responses of one engine go to one reward actor."""
        rollouts = await fleet.present("rollout")
        rewards = await fleet.present("reward", fleet.first_stage("reward"))
        timeout_s = self._num_portions(rollouts) * self._timeout_s
        parts = [
            asyncio.create_task(
                self._score(
                    rollout, rewards[index % len(rewards)], held_out, range(index, len(samplings), len(rollouts)),
                    num_samples, samplings, timeout_s,
                )
            )
            for index, rollout in enumerate(rollouts)
        ]  # fmt: skip
        try:
            await asyncio.gather(*parts)
        finally:
            await cancel_all(parts)
        return undeal([part.result() for part in parts])

    async def _score(
        self,
        rollout: tuple[str, Any],
        reward: tuple[str, Any],
        held_out: HeldOut,
        share: range,
        num_samples: int,
        samplings: Sequence[Sampling],
        timeout_s: float,
    ) -> list[Scores]:
        if not share:
            return []
        prompts = [held_out.prompts[index] for index in share]
        seen = ([held_out.pictures[index] for index in share],) if held_out.pictures else ()
        call = rollout[1].generate.remote(prompts, num_samples, [samplings[index] for index in share], *seen)
        (groups,) = await answers_or_end([(rollout[0], call)], phase="evaluation", timeout_s=timeout_s)
        tasks = [held_out.tasks[index] for index in share for _ in range(num_samples)]
        responses = [
            Response(one.text, one.token_ids, max(one.versions, default=0)) for group in groups for one in group
        ]
        scoring = reward[1].score.remote(tasks, responses)
        (scores,) = await answers_or_end([(reward[0], scoring)], phase="evaluation", timeout_s=self._timeout_s)
        return [_counted(scores[first : first + num_samples]) for first in range(0, len(scores), num_samples)]


class EnvironmentEvaluator(Evaluator):
    """An evaluator in an environment: attempts in place of responses, and the rewards that are trained on. The greedy
    attempt at a task is a group of its own, and the sampled ones are one. What the environment rejects does not count;
    an attempt that fails is wrong."""

    def __init__(self, sets: Mapping[str, HeldOut], config: RunConfig) -> None:
        super().__init__(sets, config)
        self._config, self._rewards = config, config.rewards

    async def _scores(
        self, fleet: Fleet, held_out: HeldOut, num_samples: int, samplings: Sequence[Sampling]
    ) -> list[Scores]:
        groups = await self._play(fleet, held_out, [_each(sampling, num_samples) for sampling in samplings])
        played = [(index, place, attempt) for index, group in enumerate(groups) for place, attempt in enumerate(group)]
        kept = [(index, place, attempt) for index, place, attempt in played if attempt.outcome.is_trained]
        tasks = [held_out.tasks[index] for index, _, _ in kept]
        scores = await self._score_attempts(fleet, tasks, [attempt for _, _, attempt in kept])
        found = {
            (index, place): None if score is None else replace(score, rewards=attempt.rewards)
            for (index, place, attempt), score in zip(kept, scores, strict=True)
        }
        found |= {
            (index, place): Score(0.0, 0.0, attempt.rewards, is_silent=True)
            for index, place, attempt in played
            if attempt.rewards and not attempt.outcome.is_trained
        }
        return [
            [
                found.get((index, place))
                for place, attempt in enumerate(group)
                if attempt.outcome.kind != REJECTED or attempt.rewards
            ]
            for index, group in enumerate(groups)
        ]

    async def _play(
        self, fleet: Fleet, held_out: HeldOut, samplings: Sequence[Sequence[Sampling]]
    ) -> list[Sequence[AttemptResult]]:
        """The attempts of each task's group, which one actor plays. Engines that are fewer than those of the run play
        portions of them, one after the other, or attempts would reach their limit of time."""
        engines = await fleet.present("rollout")
        size = max(1, -(-len(samplings) // self._num_portions(engines)))
        groups: list[Sequence[AttemptResult]] = []
        for first in range(0, len(samplings), size):
            groups += await self._play_portion(fleet, engines, held_out, samplings, slice(first, first + size))
        return groups

    async def _play_portion(
        self,
        fleet: Fleet,
        engines: Handles,
        held_out: HeldOut,
        samplings: Sequence[Sequence[Sampling]],
        portion: slice,
    ) -> list[Sequence[AttemptResult]]:
        players, pictures = await fleet.present("environment"), held_out.pictures[portion]
        tasks, samplings = held_out.tasks[portion], samplings[portion]

        def play(handle: Any, share: slice) -> Any:
            more: dict[str, Any] = {"pictures": pictures[share]} if pictures else {}
            if held_out.options:
                more["options"] = held_out.options
            return handle.play.remote(engines, tasks[share], samplings[share], **more)

        timeout_s = play_timeout_s(self._config, -(-sum(map(len, samplings)) // max(1, len(players))))
        return undeal(await answers_or_end(deal(players, play), phase="evaluation", timeout_s=timeout_s))

    async def _score_attempts(
        self, fleet: Fleet, tasks: Sequence[str], attempts: Sequence[AttemptResult]
    ) -> list[Score | None]:
        """Weighted sums of what the environment and the reward stages give; None where one of them fails."""
        own = [attempt.reward for attempt in attempts]
        texts = [attempt.text for attempt in attempts]
        if not self._rewards:  # the dataflow's own function, or the environment alone
            stage = fleet.first_stage("reward")
            only = own if stage is None else await self._of_stage(fleet, stage, tasks, texts)
            return [None if value is None else Score(value, value) for value in only]
        by_reward = [
            own if reward.function == ENVIRONMENT_REWARD else await self._of_stage(fleet, reward.column, tasks, texts)
            for reward in self._rewards
        ]
        weights = [reward.weight for reward in self._rewards]
        return [_summed(values, weights) for values in zip(*by_reward, strict=True)]

    async def _of_stage(
        self, fleet: Fleet, stage: str, tasks: Sequence[str], texts: Sequence[str]
    ) -> Sequence[float | None]:
        if not texts:
            return []
        actors = await fleet.present("reward", stage)
        calls = deal(actors, lambda handle, share: handle.score.remote(tasks[share], texts[share]))
        values = undeal(await answers_or_end(calls, phase="evaluation", timeout_s=self._timeout_s))
        return [value if isinstance(value, float) else None for value in values]

    def _more(self, name: str, scores: Sequence[Scores]) -> dict[str, float]:
        """Mean reward of the attempts that have one, since an environment's may be more than right or wrong, and that
        of each of several policies; and the share that was rejected, if any was."""
        scored = [score for of_one in scores for score in of_one if score is not None]
        own = [score.total for score in scored if not score.is_silent]
        found = {f"heldout_reward/{name}": _mean(own)} if own else {}
        for policy in dict.fromkeys(policy for score in scored for policy in score.rewards):
            found[f"{policy}/heldout_reward/{name}"] = _mean(
                score.rewards[policy] for score in scored if policy in score.rewards
            )
        rejected = _mean(not of_one for of_one in scores)
        return found | ({f"heldout_rejected/{name}": rejected} if rejected else {})


def play_timeout_s(config: RunConfig, num_attempts: int) -> float:
    """Seconds for one actor to play so many attempts: `max_attempts` at a time, once those that are trained have left
    room, and the engines' memory has had them wait as long as an attempt may take."""
    rounds = 2 + math.ceil(num_attempts / config.environment.max_attempts)
    return config.rollout.generate_timeout_s + rounds * config.environment.timeout_s


def _each(sampling: Sampling, count: int) -> list[Sampling]:
    """Sampling of each attempt of a group."""
    return [sampling if sampling.seed is None else sampling.seeded(sampling.seed + index) for index in range(count)]


def _summed(values: Sequence[float | None], weights: Sequence[float]) -> Score | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return Score(known[0], sum(weight * value for weight, value in zip(weights, known, strict=True)))


def _counted(results: Sequence[RewardResult]) -> Scores:
    """Scores of the responses that the reward counts."""
    counted = [result for result in results if result is not None]
    return [Score(result, result) if isinstance(result, float) else None for result in counted]


def _is_silent(score: Score | None) -> bool:
    return score is not None and score.is_silent


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / max(1, len(known))
