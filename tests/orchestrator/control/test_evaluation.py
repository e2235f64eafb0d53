"""What is measured on held-out problems, over engines that are played."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.conf.data import EvaluationConfig, EvaluationSetConfig
from penstock.conf.errors import ConfigError, DeadlineExceeded, RewardFailure, WorkerDied
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.evaluation import TRIES, EnvironmentEvaluator, Evaluator, HeldOut, play_timeout_s
from penstock.workers.agents.attempts import AttemptResult
from penstock.workers.agents.environment import Context, Task
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.protocols import Completion, Sampling
from penstock.workers.reward.reward_result import RewardResult, RewardValue
from penstock.workers.reward.signatures import Response
from penstock.workers.rollout.rollout_worker import sample_seed
from tests.fakes.actors import FakeHandle
from tests.workers.agents.played import ScriptedEngines, make_runner
from tests.workers.agents.test_engine_calls import HANGS, Engine, until_idle

NUM_PROBLEMS = 5


class Play:
    """Engines that answer a problem with its number and the sample's, and a reward that says which are right."""

    def __init__(self, right: set[tuple[int, int, bool]], num_engines: int = 2) -> None:
        """`right`: problem, sample, and whether it is the greedy one."""
        self.asked: list[tuple[int, int, Sampling]] = []
        self.deaths = 0
        self.given: RewardResult = 1.0
        """What the reward gives to those."""
        self.given_by_problem: dict[int, RewardResult] = {}
        self._right = right
        self.members = {
            "rollout": [(f"Rollout-{number}", FakeHandle(generate=self._generate)) for number in range(num_engines)],
            "reward": [("Reward-0", FakeHandle(score=self._score))],
        }

    async def present(self, role: str, stage: str | None = None) -> list[tuple[str, Any]]:
        return self.members[stage if stage in self.members else role]  # type: ignore[index]

    @staticmethod
    def first_stage(role: str) -> str:
        return role

    def _generate(self, prompts: Sequence[list[int]], count: int, samplings: Sequence[Sampling]) -> Any:
        if self.deaths:
            self.deaths -= 1
            raise WorkerDied("an engine has died")
        found = []
        for (problem,), sampling in zip(prompts, samplings, strict=True):
            self.asked.append((problem, count, sampling))
            texts = [f"{problem} {number} {sampling.temperature == 0}" for number in range(count)]
            found.append([Completion([1], [0.0], [0], text, "stop") for text in texts])
        return found

    def _score(self, tasks: Sequence[str], responses: Sequence[Response]) -> list[Any]:
        texts = [response.text for response in responses]
        assert [task.split()[0] for task in tasks] == [text.split()[0] for text in texts]
        words = [text.split() for text in texts]
        return [
            self.given_by_problem.get(int(problem), self.given)
            if (int(problem), int(number), greedy == "True") in self._right
            else RewardFailure("no number")
            for problem, number, greedy in words
        ]


def measured(play: Play, *words: str) -> dict[str, float]:
    config = load_config(["recipe=arithmetic", *words])
    held_out = HeldOut([[number] for number in range(NUM_PROBLEMS)], [f"{n} task" for n in range(NUM_PROBLEMS)])
    return asyncio.run(Evaluator({"heldout": held_out}, config).measure(play))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_engines", [1, 2, 7])
def test_the_greedy_accuracy_is_the_share_of_problems_that_are_right(num_engines: int) -> None:
    play = Play({(0, 0, True), (3, 0, True)}, num_engines)
    assert measured(play) == {"accuracy/heldout": 0.4}
    assert sorted((problem, count) for problem, count, _ in play.asked) == [(n, 1) for n in range(NUM_PROBLEMS)]
    assert {sampling.temperature for _, _, sampling in play.asked} == {0.0}


@pytest.mark.parametrize("num_engines", [1, 2, 7])
def test_samples_give_their_mean_and_the_problems_with_one_that_is_right(num_engines: int) -> None:
    play = Play({(0, 0, True), (1, 2, False), (1, 3, False), (4, 0, False)}, num_engines)
    found = measured(play, "evaluation.num_samples=4")
    assert found == {"accuracy/heldout": 0.2, "accuracy/heldout_avg@4": 3 / 20, "accuracy/heldout_pass@4": 2 / 5}
    sampled = {problem: sampling for problem, count, sampling in play.asked if count == 4}
    assert {sampling.temperature for sampling in sampled.values()} == {1.0}
    assert len({sampling.seed for sampling in sampled.values()}) == NUM_PROBLEMS


@pytest.mark.parametrize(
    ("given", "right_at", "accuracy"),
    [
        (0.9, 1.0, 0.0),
        (0.9, 0.9, 0.4),
        (-1.0, -1.0, 0.4),
        (RewardValue.of(-3.0, 1.0), 1.0, 0.4),
        (RewardValue.of(5.0, 0.0), 1.0, 0.0),
        (RewardValue.of(5.0, 0.5), 1.0, 0.2),
        (None, 1.0, 0.0),
    ],
    ids=str,
)
def test_a_response_is_right_by_its_reward_or_by_what_the_function_says_of_it(
    given: RewardResult, right_at: float, accuracy: float
) -> None:
    play = Play({(0, 0, True), (3, 0, True)})
    play.given = given
    assert measured(play, f"evaluation.right_at={right_at}") == {"accuracy/heldout": accuracy}


def test_a_response_that_the_function_does_not_count_is_not_wrong() -> None:
    play = Play({(problem, 0, True) for problem in range(NUM_PROBLEMS)})
    play.given_by_problem = {0: None, 1: 0.0}
    assert measured(play) == {"accuracy/heldout": 3 / 4}


def test_an_accuracy_to_stop_at_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.stop_at_accuracy=50.*must lie between 0 and 1"):
        EvaluationConfig(stop_at_accuracy=50)


def test_the_same_samples_are_drawn_at_every_evaluation() -> None:
    """So that two of them differ by the policy."""
    seeds = []
    for _ in range(2):
        play = Play(set())
        measured(play, "evaluation.num_samples=2")
        seeds.append(sorted((problem, sampling.seed) for problem, count, sampling in play.asked if count == 2))
    assert seeds[0] == seeds[1]


def test_problems_are_given_again_when_an_engine_dies_but_not_for_ever() -> None:
    play = Play({(2, 0, True)})
    play.deaths = TRIES - 1
    assert measured(play) == {"accuracy/heldout": 0.2}
    play.deaths = 2 * TRIES
    with pytest.raises(WorkerDied):
        measured(play)


@pytest.mark.real
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("is_late", [True, False])
def test_calls_of_an_evaluation_that_is_late_or_cancelled_end_in_their_engine(is_late: bool) -> None:
    async def scenario() -> None:
        engine = Engine.remote()  # type: ignore[attr-defined]
        await engine.num_under_way.remote()
        play = Play(set())
        play.members["rollout"] = [("Rollout-0", engine)]
        config = load_config(["recipe=arithmetic", f"rollout.generate_timeout_s={1 if is_late else 600}"])
        evaluator = Evaluator({"heldout": HeldOut([[HANGS]], ["1 task"])}, config)
        measuring = asyncio.ensure_future(evaluator.measure(play))  # type: ignore[arg-type]
        if not is_late:
            await engine.begun.remote()
            measuring.cancel()
        with pytest.raises(DeadlineExceeded if is_late else asyncio.CancelledError):
            await measuring
        await until_idle(engine)

    asyncio.run(scenario())


def test_the_other_engines_are_not_asked_any_more_once_one_has_died() -> None:
    ended = []

    async def hangs(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def dies(*_: Any) -> None:
        raise WorkerDied("an engine has died")

    play = Play(set())
    play.members["rollout"] = [("Rollout-0", FakeHandle(generate=hangs)), ("Rollout-1", FakeHandle(generate=dies))]
    config = load_config(["recipe=arithmetic"])
    evaluator = Evaluator({"heldout": HeldOut([[0], [1]], ["0 task", "1 task"])}, config)

    async def scenario() -> None:
        with pytest.raises(WorkerDied):
            await evaluator.measure(play)  # type: ignore[arg-type]
        assert len(ended) == TRIES

    asyncio.run(scenario())


def test_sets_have_names_problems_and_metrics_of_their_own() -> None:
    play = Play({(0, 0, True), (1, 0, True), (3, 0, True)})
    config = load_config(["recipe=arithmetic"])
    sets = {"heldout": HeldOut([[0], [1]], ["0 task", "1 task"]), "hard": HeldOut([[2], [3]], ["2 task", "3 task"])}
    found = asyncio.run(Evaluator(sets, config).measure(play))  # type: ignore[arg-type]
    assert found == {"accuracy/heldout": 1.0, "accuracy/hard": 0.5}


def test_attempts_that_wait_for_one_another_have_the_time_of_each() -> None:
    words = ["environment.max_attempts=10", "environment.timeout_s=60", "rollout.generate_timeout_s=100"]
    config = load_config(["recipe=arithmetic", *words])
    assert [play_timeout_s(config, number) for number in (1, 10, 11, 95)] == [280, 280, 340, 820]


class Words:
    """An environment whose policy says a word, right or wrong by the environment, and long by another reward."""

    async def run(self, task: Task, ctx: Context) -> None:
        turn = await ctx.sample([{"role": "user", "content": task.data["word"]}])
        if turn.text == "stop":
            ctx.reject("stop")
        ctx.reward(float(turn.text == task.data["word"]))


class Compared(Words):
    """Of a group's answers only the longest are right, whatever `run` has said."""

    async def score_group(self, task: Task, attempts: Sequence[Trajectory]) -> list[float]:
        most = max(len(attempt.turns[-1].text) for attempt in attempts)
        return [float(len(attempt.turns[-1].text) == most > 1) for attempt in attempts]


def played(
    environment: Any, words: Sequence[str], *settings: str, num_players: int = 2, policies: Sequence[str] = ()
) -> dict[str, float]:
    """`words`: one a problem, which the policy is asked for and says; sampled ones are "a", "aa", … by their seeds."""
    groups: list[int] = []

    def says(prompt: str, sampling: Sampling) -> str:
        first = sample_seed(config.evaluation.seed, next(n for n, word in enumerate(words) if word in prompt))
        return (
            next(word for word in words if word in prompt)
            if not sampling.temperature
            else "a" * ((sampling.seed or 0) - first + 1)
        )

    async def play(engines: Any, tasks: Sequence[str], samplings: Sequence[Sequence[Sampling]]) -> Any:
        groups.extend(map(len, samplings))
        plays = [await runner.group(Task.from_json(task), own) for task, own in zip(tasks, samplings, strict=True)]
        return [list(map(AttemptResult.of, group)) for group in plays]

    def by_length(tasks: Sequence[str], texts: Sequence[str]) -> list[Any]:
        assert all(text == "no" or "a" in text or text in task for task, text in zip(tasks, texts, strict=True))
        return [RewardFailure("too short") if text == "no" else float(len(text)) for text in texts]

    fleet = Play(set())
    fleet.members |= {
        "environment": [(f"Environment-{n}", FakeHandle(play=play)) for n in range(num_players)],
        "reward_by_length": [(f"Reward-{n}", FakeHandle(score=by_length)) for n in range(2)],
    }
    fleet.first_stage = lambda role: None  # type: ignore[method-assign,assignment]
    config = load_config(["recipe=guess", "rollout.sampling.max_tokens=30", *settings])
    runner = make_runner(environment, ScriptedEngines(says), policies=policies)
    tasks = [json.dumps({"index": n, "word": word}) for n, word in enumerate(words)]
    found = asyncio.run(EnvironmentEvaluator({"heldout": HeldOut([], tasks)}, config).measure(fleet))  # type: ignore[arg-type]
    assert set(groups) == {1, config.evaluation.num_samples or 1}
    return found


def test_an_environment_is_measured_by_the_rewards_that_are_trained_on() -> None:
    """Of words of 2, 4, 5 and 2 characters, of which the second is rejected and the last has no length."""
    rewards = "rewards=[{function: environment}, {function: lengths.py:by_length, weight: 0.5}]"
    words = ["up", "stop", "right", "no"]
    rejected = {"heldout_rejected/heldout": 0.25}
    assert played(Words(), words) == {"accuracy/heldout": 1.0, "heldout_reward/heldout": 1.0, **rejected}
    assert played(Words(), words, rewards) == {
        "accuracy/heldout": 2 / 3, "heldout_reward/heldout": (1 + 0.5 * 2 + 1 + 0.5 * 5) / 2, **rejected,
    }  # fmt: skip


@pytest.mark.parametrize("num_samples", [0, 3])
def test_engines_fewer_than_the_runs_play_portions_and_find_the_same(num_samples: int) -> None:
    """As when some are lent: no attempt is slower, and none of a portion is left out."""
    asked = list[int]()

    class Counted(Words):
        async def run(self, task: Any, ctx: Any) -> None:
            asked.append(task.data["index"])
            await super().run(task, ctx)

    words, more = ["up", "stop", "right", "no", "left"], f"evaluation.num_samples={num_samples}"
    found = played(Counted(), words, more)
    greedy = asked[: len(words)]
    asked.clear()
    assert played(Counted(), words, more, "rollout.num_workers=6", num_players=1) == found
    assert sorted(asked[: len(words)]) == sorted(greedy)


def test_each_of_several_policies_is_measured_by_its_own_rewards() -> None:
    """Where the solver says nothing, the attempt counts for the other alone."""

    class Two(Words):
        async def run(self, task: Task, ctx: Context) -> None:
            await ctx.sample([{"role": "user", "content": task.data["word"]}], policy="proposer")
            ctx.reward(len(task.data["word"]), policy="proposer")
            if task.data["word"] != "left":
                await super().run(task, ctx)

    found = played(Two(), ["up", "right", "left"], policies=["solver", "proposer"])
    assert found["accuracy/heldout"] == found["heldout_reward/heldout"] == found["solver/heldout_reward/heldout"] == 1.0
    assert found["proposer/heldout_reward/heldout"] == ((1 + 2) + (1 + 5) + 4) / 3
    assert "heldout_rejected/heldout" not in found


class Failing(Words):
    """Raises where the policy says so, and rejects every second sampled attempt."""

    async def run(self, task: Task, ctx: Context) -> None:
        await super().run(task, ctx)
        said = ctx.turns[-1].text
        if said == "fail":
            raise ValueError("the game crashed")
        if said and not said.strip("a") and len(said) % 2:
            ctx.reject("odd")
        ctx.reward(float(said == "aa"))


def test_attempts_that_are_rejected_are_left_out_and_those_that_fail_are_wrong() -> None:
    """Of four samples "a" to "aaaa" two are rejected, and one of the others is right."""
    assert played(Failing(), ["up", "fail", "stop"], "evaluation.num_samples=4") == {
        "accuracy/heldout": 0.5, "heldout_reward/heldout": 1.0, "heldout_rejected/heldout": 1 / 3,
        "accuracy/heldout_avg@4": 0.5, "accuracy/heldout_pass@4": 1.0,
    }  # fmt: skip


def test_problems_whose_attempts_are_all_rejected_leave_accuracy_without_any() -> None:
    assert played(Words(), ["stop"]) == {"accuracy/heldout": 0.0, "heldout_rejected/heldout": 1.0}


def test_accuracy_in_an_environment_goes_by_the_first_reward() -> None:
    rewards = "rewards=[{function: lengths.py:by_length}, {function: environment, weight: -1}]"
    assert played(Words(), ["up", "stop"], rewards) == {
        "accuracy/heldout": 1.0, "heldout_reward/heldout": 2 - 1.0, "heldout_rejected/heldout": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("num_players", [1, 2, 3])
def test_what_an_environment_says_of_a_group_is_measured(num_players: int) -> None:
    """The greedy attempt is a group of its own, and the sampled ones are one."""
    found = played(Compared(), ["u", "right"], "evaluation.num_samples=4", num_players=num_players)
    assert found == {
        "accuracy/heldout": 0.5, "heldout_reward/heldout": 0.5,
        "accuracy/heldout_avg@4": 0.25, "accuracy/heldout_pass@4": 1.0,
    }  # fmt: skip


def test_no_problem_of_a_set_is_trained_on() -> None:
    """Made by reasoning-gym, from settings that may well make the same ones."""
    words = ["evaluation.sets={same: {seed: 0, num_problems: 20}, long: {options: {min_terms: 3, max_terms: 3}}}"]
    config = load_config(["recipe=arithmetic", "evaluation.num_problems=10", "data.size=50", *words])
    train = open_dataset(config.data, config.evaluation)
    assert train is not None
    trained = {train.row(index).prompt for index in range(50)}
    for name, number in (("same", 20), ("long", 200)):
        held_out = open_dataset(*config.evaluation.of_set(name, config.data), held_out=True)
        assert held_out is not None
        assert len(held_out) == number
        assert not trained & {held_out.row(index).prompt for index in range(number)}


def test_held_out_problems_may_have_options_of_their_own() -> None:
    words = ["evaluation.options={min_terms: 5, max_terms: 5}", "evaluation.sets={as_trained: {num_problems: 3}}"]
    config = load_config(["recipe=arithmetic", "evaluation.num_problems=10", *words])
    own = open_dataset(config.data, config.evaluation, held_out=True)
    of_set = open_dataset(*config.evaluation.of_set("as_trained", config.data), held_out=True)
    assert own is not None
    assert of_set is not None
    assert all(len(re.findall(r"\d+", own.row(index).prompt)) == 5 for index in range(10))
    assert all(len(re.findall(r"\d+", of_set.row(index).prompt)) < 5 for index in range(3))


def test_held_out_tasks_may_change_the_environments_options() -> None:
    config = load_config(["recipe=tictactoe_two"])
    assert config.environment_changes() == {"opponents": ["random"]}
    assert config.with_held_out().environment.options == {"opponents": ["random"]}
    assert config.with_held_out("perfect").environment.options == {"opponents": ["perfect"]}
    assert config.environment.options == {}
    assert replace(config, data=replace(config.data, source="jsonl")).environment_changes() == {}


@pytest.mark.parametrize("name", ["heldout", "7b", "a-b", "a b"])
def test_names_that_are_no_metrics_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a name is letters"):
        EvaluationConfig(sets={name: EvaluationSetConfig()})
