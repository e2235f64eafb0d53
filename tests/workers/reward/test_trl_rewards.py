"""TRL's own reward functions, unmodified, by name and as objects, called as its trainers call them."""

import inspect
import json
from typing import Any

import pytest
import trl.rewards

from penstock.conf.errors import ConfigError
from penstock.workers.reward.reward_child import BatchScorer
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import RewardError
from penstock.workers.reward.signatures import Caller, Response, RewardFunction, adapt, with_task

SOLUTION = r"$\frac{1}{3}$"
RIGHT, WRONG = (rf"<think>\boxed{{9}}</think>It is \boxed{{\frac{{1}}{{{number}}}}}." for number in (3, 4))
TASK = {"prompt": "1/3?", "answer": SOLUTION, "solution": SOLUTION}
MAKERS = {
    "get_cosine_scaled_reward": {"max_len": 8},
    "get_repetition_penalty_reward": {"ngram_size": 2},
    "get_soft_overlong_punishment": {"max_completion_len": 4, "soft_punish_cache": 2},
}
EXPECTED: dict[str, list[float | None]] = {
    "accuracy_reward": [1.0, 0.0],
    "reasoning_accuracy_reward": [1.0, 0.0],
    "think_format_reward": [1.0, 1.0],
    "get_cosine_scaled_reward": [0.75, -0.75],
    "get_repetition_penalty_reward": [0.0, -2 / 3],
    "get_soft_overlong_punishment": [-1.0, -1.0],
}


def scored(reward: RewardSpec | RewardFunction, responses: list[Any], tasks: list[dict[str, Any]]) -> list[Any]:
    """Results as in a process of the pool."""
    results: list[Any] = ["none came"] * len(responses)
    samples = [with_task(response, json.dumps(task)) for response, task in zip(responses, tasks, strict=True)]
    function = reward.resolve() if isinstance(reward, RewardSpec) else reward
    BatchScorer(function, 10).score(
        [response for response, _ in samples], [columns for _, columns in samples], results.__setitem__
    )
    return results


def test_the_list_of_trls_rewards_is_whole() -> None:
    functions = [name for name in dir(trl.rewards) if inspect.isroutine(getattr(trl.rewards, name))]
    assert sorted(EXPECTED) == sorted(name for name in functions if not name.startswith("_"))


@pytest.mark.parametrize("conversation", [False, True], ids=["text", "messages"])
@pytest.mark.parametrize("name", EXPECTED)
def test_each_of_trls_rewards_runs_by_name(name: str, conversation: bool) -> None:
    more = {"task_messages": [{"role": "user", "content": "1/3?"}]} if conversation else {}
    responses = [Response(RIGHT, [1, 2, 3, 4]), Response(WRONG, [1, 1, 1, 1])]
    spec = RewardSpec.of(f"trl.rewards:{name}", MAKERS.get(name))
    results = scored(spec, responses, [TASK | more] * 2)
    assert results == pytest.approx(EXPECTED[name])


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_maker_of_trl_has_made_is_a_reward_as_an_object(name: str) -> None:
    made = getattr(trl.rewards, name)(**MAKERS[name])
    responses = [Response(RIGHT, [1, 2, 3, 4]), Response(WRONG, [1, 1, 1, 1])]
    assert scored(RewardSpec.of(made), responses, [TASK] * 2) == pytest.approx(EXPECTED[name])


def test_a_sample_whose_solution_cannot_be_read_does_not_count() -> None:
    tasks = [TASK, TASK | {"solution": ""}]
    assert scored(RewardSpec.of("trl.rewards:accuracy_reward"), [Response(RIGHT)] * 2, tasks) == [1.0, None]


def test_the_answer_stands_in_for_the_column_solution() -> None:
    task = {"prompt": "1/3?", "answer": SOLUTION}
    assert scored(RewardSpec.of("trl.rewards:accuracy_reward"), [Response(RIGHT)], [task]) == [1.0]


def test_functions_get_messages_where_the_prompt_is_a_conversation() -> None:
    seen: list[Any] = []

    def score(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
    scored(adapt(score), [Response("4")], [{"prompt": "2+2", "task_messages": conversation}])
    scored(adapt(score), [Response("4")], [{"prompt": "2+2"}])
    assert seen == [([conversation], [[{"role": "assistant", "content": "4"}]]), (["2+2"], ["4"])]


def test_functions_get_the_step_and_log_metrics() -> None:
    def score(completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("share", trainer_state.global_step / 10)
        log_extra("lengths", [len(one) for one in completions])
        return [float(trainer_state.global_step)] * len(completions)

    logged: list[Any] = []
    caller = Caller(log_metric=lambda *metric: logged.append(metric))
    results = scored(adapt(score, caller=caller), [Response("a", version=3), Response("b", version=4)], [{}, {}])
    assert results == [4.0, 4.0]
    assert logged == [("share", 0.4)]


def test_a_maker_without_its_options_says_which_it_wants() -> None:
    with pytest.raises(ConfigError, match=r"get_cosine_scaled_reward\(max_len.*fits no known signature"):
        RewardSpec.of("trl.rewards:get_cosine_scaled_reward").resolve()


def test_a_maker_that_refuses_its_options_is_told() -> None:
    spec = RewardSpec.of("trl.rewards:get_repetition_penalty_reward", {"max_penalty": 1.0})
    with pytest.raises(ConfigError, match=r"made no reward: ValueError: max_penalty 1.0 should not be positive"):
        spec.resolve()


def test_none_of_a_function_that_scores_one_sample_is_an_error() -> None:
    (result,) = scored(RewardSpec.of(lambda response, task: None), [Response("x")], [{}])
    assert isinstance(result, RewardError)


def test_trls_rewards_have_the_parameters_that_they_are_called_with() -> None:
    known = {"prompts", "completions", "completion_ids", "solution", "log_extra", "log_metric", "trainer_state"}
    for name in EXPECTED:
        function = getattr(trl.rewards, name)
        made = function(**MAKERS[name]) if name in MAKERS else function
        required = [key for key, one in inspect.signature(made).parameters.items() if one.default is one.empty]
        assert {*required} <= known | {"kwargs"}
