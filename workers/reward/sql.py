"""`reward.function=sql_result`: a query against a small SQLite database, by the rows that it returns.

Both queries run in the sandbox, each in an execution and a database of its own; their rows are compared here.
"""

import functools
import re
from collections import Counter
from typing import Any

from penstock.workers.reward.fences import BUDGET_S, last_block, sandbox, warm
from penstock.workers.reward.registry import reward
from penstock.workers.sandbox.execution import Failed, Result
from penstock.workers.sandbox.sandbox import BlockingSandbox

SQL = ("sql", "sqlite")
MAX_ROWS = 10_000
"""Largest number of rows of a result. More are cut, and so equal to no other result of another length."""
DIGITS = 9
"""Number of digits of floats that are compared."""
INSIDE = f"""
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
Rows = list[list[Any]]


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
def _gold(fence: BlockingSandbox, setup: str, query: str, wall_s: float) -> Rows:
    """The rows of the reference query, cached for all responses to a task."""
    result = _run(fence, setup, query, wall_s)
    if isinstance(result, Failed):
        raise ValueError(f"the row's own query fails: {result.reason}: {result.text[-200:]}")
    rows: Rows = result.data
    return rows


def _run(fence: BlockingSandbox, setup: str, query: str, wall_s: float) -> Result:
    return fence.call(INSIDE, "rows", [[setup, query]], wall_s=wall_s)[0]


def _are_rows(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(row, list) for row in data)


def same_rows(gold: Rows, got: Rows, in_order: bool) -> bool:
    ours, theirs = ([tuple(map(_cell, row)) for row in rows] for rows in (gold, got))
    return ours == theirs if in_order else Counter(ours) == Counter(theirs)


def _cell(value: Any) -> str:
    """A text that is equal for equal values. 1 and 1.0 are equal, as in SQLite."""
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 10**DIGITS else f"{value:.{DIGITS}g}"
    return repr(value)


QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)


def is_ordered(query: str) -> bool:
    """Return whether the query as a whole has an ORDER BY: one outside of all parentheses."""
    depth = 0
    outside = []
    for character in QUOTED.sub(" ", query):
        depth += (character == "(") - (character == ")")
        outside.append(character if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(outside), re.IGNORECASE) is not None
