"""Rewards that execute code; what attacks on them come to is in `tests/sandbox/`."""

import json

import pytest

from penstock.workers.reward.code import last_block, python_tests

ADD = {"function": "add", "tests": [{"input": [1, 2], "output": 3}, {"input": [2, 2], "output": 4}]}
SUM = {"tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 2", "stdout": "4"}]}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("I think:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is it.", 1.0),
        ("```python\ndef add(a, b): return 0\n```\nNo:\n```py\ndef add(a, b): return a + b", 1.0),
        ("```python\ndef add(a, b): return 3\n```\n```text\n7\n```", 0.5),
        ("def add(a, b): return a - b", 0.0),
        ("", 0.0),
    ],
)
def test_functions_are_called_and_their_share_of_right_answers_counts(response, reward):
    assert python_tests(response, ADD) == reward
    assert python_tests(response, ADD, share=False) == float(reward == 1.0)


def test_programs_are_run_and_their_lines_compared():
    source = "a, b = map(int, input().split())\nprint(a + b, '')"
    assert python_tests(source, SUM) == 1.0
    assert python_tests("print(3)", SUM) == 0.5
    assert python_tests("print(3)", SUM, share=False) == 0.0
    assert python_tests("print(3)\nprint(3)", SUM) == 0.0
    assert python_tests(source + "\nexit(1)", SUM) == 0.0
    assert python_tests(source, {"tests": json.dumps(SUM["tests"])}) == 1.0


def test_all_tests_of_a_response_have_one_budget():
    task = {"tests": [{"stdin": "", "stdout": "1"}] * 50}
    assert 0.0 < python_tests("import time\ntime.sleep(0.2)\nprint(1)", task, budget_s=1.0) <= 0.1


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ({}, "list of tests"),
        ({"tests": []}, "list of tests"),
        ({"tests": [{"input": [1]}]}, '"input" and "output"'),
        ({"tests": [{"input": [1], "output": 1}, {"stdin": "", "stdout": ""}]}, '"input" and "output"'),
        ({"tests": [{"input": [1], "output": 1}]}, "name of the function"),
    ],
)
def test_a_row_without_tests_is_the_datas_fault_and_not_the_responses(task, complaint):
    with pytest.raises(ValueError, match=complaint):
        python_tests("x", task)


def test_the_last_block_of_the_language_is_taken():
    assert last_block("a\n```python\n1\n```\n```python title\n2\n```\n```\n3\n```", ("python",)) == "2\n"
    assert last_block("no block", ("python",)) == "no block"
    assert last_block("``` Python\nx\n", ("python",)) == "x\n"
