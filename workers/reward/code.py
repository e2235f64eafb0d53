"""The rewards that execute code of the response, in a sandbox: `reward.function=python_tests`, a Python program or a
function against tests, and `sql_result`, a query against a small SQLite database, by the rows that it returns.

    response ─▶ the last block in its language ─▶ sandbox, with inputs or a database ─▶ data ─▶ compared here

What is expected stays in this process. So code can lie about what it computed, and never about whether that is right. A
reward process has a sandbox for each set of limits, kept ready between samples. A sandbox ends with its process, also
when the pool kills that.
"""

import functools
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.workers.reward.reward_registry import reward
from penstock.workers.sandbox.execution import CallResult, Failed, Limits, Value, same
from penstock.workers.sandbox.sandbox import BlockingSandbox

BUDGET_S = 8.0
"""Seconds for all executions of a response. Less than `reward.timeout_s` (10 s), at which the pool would drop the
sample instead of scoring it 0."""
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
PYTHON, SQL = ("python", "py", "python3"), ("sql", "sqlite")
"""Labels of blocks in a language."""
Test = dict[str, Any]
QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)
MAX_ROWS = 10_000
"""Largest number of rows of a result. More are cut, and so equal to no other result of another length."""
DIGITS = 9
"""Number of digits of floats that are compared."""
QUERY_PROGRAM = f"""
import sqlite3

def plain(cell):
    if isinstance(cell, bytes):
        return {{"blob": cell.hex()}}
    if isinstance(cell, float) and cell in (float("inf"), float("-inf")):
        return {{"real": repr(cell)}}
    return cell

def rows(setup, query):
    connection = sqlite3.connect(":memory:")
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.executescript(setup)
    connection.commit()
    connection.execute("PRAGMA query_only = ON")
    cursor = connection.execute(query)
    return [[plain(cell) for cell in row] for row in cursor.fetchmany({MAX_ROWS + 1})]
"""
SqlRows = list[list[Any]]


def sandbox(limits: Mapping[str, Any] | None = None) -> BlockingSandbox:
    """The sandbox with these limits. `limits`: keys of `SandboxConfig`. Raises `ConfigError`."""
    return _sandbox(limits_of(limits))


_sandbox = functools.cache(BlockingSandbox)


def limits_of(limits: Mapping[str, Any] | None) -> Limits:
    """The limits that a reward's option means. Raises `ConfigError`."""
    known = SandboxConfig.__dataclass_fields__
    for key in limits or {}:
        if key not in known:
            raise ConfigError(f"reward.options.limits.{key}: the sandbox has no such limit{suggest(key, known)}")
    try:
        return Limits.of(SandboxConfig(**(limits or {})))
    except TypeError as error:
        raise ConfigError(
            f"reward.options.limits={limits}: {error}. Limits are numbers (conf/environment.py)."
        ) from None


def warm(options: Mapping[str, Any]) -> None:
    """Start the sandbox before the first sample's deadline begins. Raises `SandboxUnavailable`, `ConfigError`."""
    sandbox(options.get("limits")).start()


def last_block(response: str, languages: tuple[str, ...]) -> str:
    """The last block of a response that is fenced by ``` and labelled with one of the languages; else the whole text.
    A block that is not closed extends to the end."""
    blocks = [text for label, text in FENCE.findall(response) if label.lower() in languages]
    return blocks[-1] if blocks else response


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


@reward("sql_result", warm=warm)
def sql_result(
    response: str, task: dict[str, Any], budget_s: float = BUDGET_S, limits: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the response's query returns the rows of the row's `query`, else 0.0.

    The query is the last block of the response labelled sql, or the whole response. The row's `setup` makes the
    database: statements with a schema and data. Rows are compared in order if the row's own query has an ORDER BY of
    its own (not one of a part of it), else in any order; columns by their places, floats by nine digits.

    `budget_s`: seconds for both queries, less than `reward.timeout_s`. `limits`: keys of `SandboxConfig`. Raises
    `ValueError` if the row's own query fails, and `SandboxUnavailable`.
    """
    setup, query = (task.get(key) for key in ("setup", "query"))
    if not isinstance(setup, str) or not isinstance(query, str):
        raise ValueError(f"the row's `setup` and `query` are {setup!r:.40} and {query!r:.40}, where SQL is due")
    fence = sandbox(limits)
    gold = _gold(fence, setup, query, budget_s / 2)
    got = _run(fence, setup, last_block(response, SQL).strip(), budget_s / 2)
    if isinstance(got, Failed) or not _are_rows(got.data):
        return 0.0
    return float(same_rows(gold, got.data, in_order=is_ordered(query)))


@functools.lru_cache(maxsize=256)
def _gold(fence: BlockingSandbox, setup: str, query: str, wall_s: float) -> SqlRows:
    """The rows of the reference query, cached for all responses to a task."""
    result = _run(fence, setup, query, wall_s)
    if isinstance(result, Failed):
        raise ValueError(f"the row's own query fails: {result.reason}: {result.text[-200:]}")
    rows: SqlRows = result.data
    return rows


def _run(fence: BlockingSandbox, setup: str, query: str, wall_s: float) -> CallResult:
    return fence.call(QUERY_PROGRAM, "rows", [[setup, query]], wall_s=wall_s)[0]


def _are_rows(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(row, list) for row in data)


def same_rows(gold: SqlRows, got: SqlRows, in_order: bool) -> bool:
    ours, theirs = ([tuple(map(_cell, row)) for row in rows] for rows in (gold, got))
    return ours == theirs if in_order else Counter(ours) == Counter(theirs)


def _cell(value: Any) -> str:
    """A text that is equal for equal values. 1 and 1.0 are equal, as in SQLite."""
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 10**DIGITS else f"{value:.{DIGITS}g}"
    return repr(value)


def is_ordered(query: str) -> bool:
    """Return whether the query as a whole has an ORDER BY: one outside of all parentheses."""
    depth = 0
    outside = []
    for character in QUOTED.sub(" ", query):
        depth += (character == "(") - (character == ")")
        outside.append(character if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(outside), re.IGNORECASE) is not None
