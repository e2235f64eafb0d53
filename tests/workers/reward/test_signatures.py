"""Kinds of reward functions, and the arguments that each kind is called with."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from penstock.conf.errors import ConfigError
from penstock.workers.reward.reward_result import RewardError, as_score
from penstock.workers.reward.signatures import adapt

TASK = {"prompt": "2+2", "answer": "4", "index": 7, "data_source": "sums"}


def test_own_signature_gets_response_and_task():
    scorer = adapt(lambda response, task: (response, task["index"]))
    assert scorer.one("x", TASK) == ("x", 7)


def test_own_signature_may_take_the_answer_alone():
    assert adapt(lambda response, answer: response == answer).one("4", TASK) is True


def test_trl_signature_gets_lists_of_prompts_completions_and_columns_it_names():
    def score(prompts, completions, answer):
        return list(zip(prompts, completions, answer, strict=True))

    assert adapt(score).many(["x", "y"], [TASK, TASK]) == [("2+2", "x", "4"), ("2+2", "y", "4")]


def test_trl_signature_with_keywords_gets_every_column():
    def score(completions, **columns):
        return [sorted(columns)]

    of_trl = ["completion_ids", "log_extra", "log_metric", "prompts", "trainer_state"]
    assert adapt(score).many(["x"], [TASK]) == [sorted(["answer", "data_source", "index", "prompt", *of_trl])]


def test_trl_signature_that_asks_for_an_absent_column_says_which_there_are():
    scorer = adapt(lambda completions, levels: [0.0])
    with pytest.raises(ValueError, match=r"column 'levels'.*Known: answer, data_source, index, prompt"):
        scorer.many(["x"], [TASK])


def test_verl_signature_gets_its_four_arguments():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return (data_source, solution_str, ground_truth, extra_info["index"])

    assert adapt(compute_score).one("x", TASK) == ("sums", "x", "4", 7)


def test_async_functions_and_async_callables_are_known_as_such():
    async def score(response, task):
        return 1.0

    class Judge:
        async def __call__(self, response, task):
            return 2.0

    assert adapt(score).is_async
    assert adapt(Judge()).is_async
    assert asyncio.run(adapt(Judge()).one("x", TASK)) == 2.0
    assert not adapt(lambda response, task: 0.0).is_async


def test_options_are_bound_and_may_fill_parameters_that_nobody_provides():
    def score(response, task, scale):
        return scale * len(response)

    assert adapt(score, {"scale": 3}).one("ab", TASK) == 6
    assert adapt(functools.partial(score, scale=2)).one("ab", TASK) == 4
    with pytest.raises(ConfigError, match=r"score asks for scale.*reward\.options"):
        adapt(score)


def test_unknown_option_names_the_nearest_parameter():
    with pytest.raises(ConfigError, match=r"reward\.options\.scal: .*did you mean 'scale'"):
        adapt(lambda response, task, scale=1: 0.0, {"scal": 2})


@pytest.mark.parametrize("function", [lambda a, b: 0.0, lambda: 0.0, "not a function", print])
def test_other_signatures_are_refused_with_the_three_known_ones(function):
    with pytest.raises(ConfigError, match=r"\(response, task\).*completions.*solution_str"):
        adapt(function)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor([2.0]), 2.0),
        ({"score": 3, "acc": 1}, 3.0),
    ],
)
def test_numbers_of_all_kinds_are_scores(value, score):
    assert as_score(value) == score


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (10**400, "whole number"),
        ({"score": 1.0, "acc": "yes"}, "str 'yes'"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("1.0", "str '1.0'"),
        ([1.0], "list"),
        ({"accuracy": 1.0}, 'without "score"'),
        (torch.ones(3), "3 elements"),
        (np.ones(2), "2 elements"),
    ],
)
def test_anything_else_is_an_error_that_says_what_it_was(value, text):
    error = as_score(value)
    assert isinstance(error, RewardError)
    assert error.kind == "bad_value"
    assert text in error.text
