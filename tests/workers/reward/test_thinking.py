"""The thinking is not the answer: what each kind of reward function reads of a response."""

import json
from typing import Any

import pytest

from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.signatures import Response, with_task
from tests.workers.reward.test_trl_rewards import scored

THINKS = "<think>\\boxed{4}</think>The answer is 5."


def own(response: str, task: dict[str, Any]) -> float:
    return float(len(response))


def trl(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(len(solution_str))}


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (THINKS, "4", 0.0),
        (THINKS, "5", 1.0),
        ("<think>It is \\boxed{4}, or", "4", 0.0),
        ("[THINK]\\boxed{4}[/THINK]\\boxed{5}", "5", 1.0),
        ("[THINK]\\boxed{4}", "4", 0.0),
        ("<|channel|>analysis<|message|>\\boxed{4}assistant<|channel|>final<|message|>5", "5", 1.0),
        ("<|channel|>analysis<|message|>\\boxed{4}", "4", 0.0),
        ("\\boxed{4}", "4", 1.0),
    ],
)
def test_the_answer_stands_after_the_thinking(text: str, answer: str, score: float) -> None:
    assert scored(RewardSpec.of("math_verify"), [Response(text)], [{"answer": answer}]) == [score]


def test_a_cut_response_has_no_answer_where_the_prompt_has_begun_the_thinking() -> None:
    task = {"answer": "4", "prompt_opens_thinking": True}
    texts = ["First, \\boxed{4}", "First, 9.</think>\\boxed{4}"]
    assert scored(RewardSpec.of("math_verify"), [Response(text) for text in texts], [task, task]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("with_thinking", "lengths"),
    [(None, [16, 40, 40]), (True, [40, 40, 40]), (False, [16, 16, 16])],
)
def test_functions_of_trl_and_verl_get_the_whole_text_unless_told_otherwise(
    with_thinking: bool | None, lengths: list[int]
) -> None:
    found = []
    for function in (own, trl, verl):
        spec = RewardSpec(RewardSpec.of(function).function, with_thinking=with_thinking)
        found += scored(spec, [Response(THINKS)], [{"data_source": "x", "answer": "5"}])
    assert found == lengths


def test_an_environments_answer_is_scored_as_it_is() -> None:
    assert scored(RewardSpec.of(own), [THINKS], [{"prompt_opens_thinking": True}]) == [len(THINKS)]


def test_functions_do_not_see_what_is_said_of_the_prompt() -> None:
    task = {"prompt": "x", "prompt_opens_thinking": True, "task_messages": [{"role": "user", "content": "x"}]}
    response, columns = with_task(Response("a"), json.dumps(task))
    assert columns == {"prompt": "x"}
    assert (response.opens_thinking, response.prompt) == (True, task["task_messages"])
