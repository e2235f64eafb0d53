"""`reward.function=python_tests`: a Python program, or a function, against tests.

The code runs in the sandbox and is given inputs; it returns data. What is expected stays in this process, and is
compared here. So code can lie about what it computed, and never about whether that is right.
"""

import json
import time
from typing import Any

from penstock.workers.reward.fences import BUDGET_S, last_block, sandbox, warm
from penstock.workers.reward.registry import reward
from penstock.workers.sandbox.execution import Value, same
from penstock.workers.sandbox.sandbox import BlockingSandbox

PYTHON = ("python", "py", "python3")
Test = dict[str, Any]


@reward("python_tests", warm=warm)
def python_tests(
    response: str,
    task: dict[str, Any],
    share: bool = True,
    budget_s: float = BUDGET_S,
    tolerance: float = 1e-9,
    limits: dict[str, Any] | None = None,
) -> float:
    """The share of tests passed, from 0 to 1. `share=False`: 1.0 for all of them, else 0.0.

    The code is the last block of the response labelled python, or the whole response. The row's `tests` is a list (or
    its JSON), either of {"input": [arguments], "output": value} for the function that the row's `function` names
    (`solve`, `Solution.solve`), or of {"stdin": text, "stdout": text} for a program. Functions are called in turn in
    one process; what ends that fails the calls after it. Programs are run once for each test, and their lines compared
    without blanks at their ends.

    `budget_s`: seconds for all tests together, less than `reward.timeout_s`; what is not done then has failed.
    `tolerance`: relative, between floats. `limits`: the sandbox's, keys of `SandboxConfig`. Raises `ValueError` for a
    row that has no such tests, and `SandboxUnavailable`.
    """
    tests = tests_of(task)
    source = last_block(response, PYTHON)
    if "input" in tests[0]:
        passed = _passed_calls(sandbox(limits), source, _function_of(task), tests, budget_s, tolerance)
    else:
        passed = _passed_runs(sandbox(limits), source, tests, budget_s, stop=not share)
    return passed / len(tests) if share else float(passed == len(tests))


def tests_of(task: dict[str, Any]) -> list[Test]:
    """The tests of a row: of one kind, and at least one. Raises `ValueError`."""
    tests = task.get("tests")
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the row's `tests` is {tests!r:.80}, where a list of tests is due")
    for keys in (("input", "output"), ("stdin", "stdout")):
        if all(isinstance(test, dict) and all(key in test for key in keys) for test in tests):
            return tests
    raise ValueError(
        f'each of the row\'s `tests` has "input" and "output", or each "stdin" and "stdout"; first: {tests[0]!r:.80}'
    )


def _function_of(task: dict[str, Any]) -> str:
    name = task.get("function")
    if not isinstance(name, str):
        raise ValueError(f"the row's `function` is {name!r:.80}, where the name of the function to call is due")
    return name


def _passed_calls(
    fence: BlockingSandbox, source: str, function: str, tests: list[Test], budget_s: float, tolerance: float
) -> int:
    results = fence.call(source, function, [test["input"] for test in tests], wall_s=budget_s)
    return sum(
        isinstance(result, Value) and same(test["output"], result.data, tolerance)
        for test, result in zip(tests, results, strict=True)
    )


def _passed_runs(fence: BlockingSandbox, source: str, tests: list[Test], budget_s: float, stop: bool) -> int:
    """Number of tests passed by a program. `stop`: at the first failure, as the rest cannot mend it."""
    deadline = time.monotonic() + budget_s
    passed = 0
    for test in tests:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        outcome = fence.run_python(source, test["stdin"], wall_s=left_s)
        if outcome.is_success and _lines(outcome.stdout) == _lines(test["stdout"]):
            passed += 1
        elif stop:
            break
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
