"""Rewards that execute code and queries, which are judged by their rows. Attacks on them are in `tests/sandbox/`."""

import json

import pytest

from penstock.workers.reward.code import is_ordered, last_block, python_tests, same_rows, sql_result

ADD = {"function": "add", "tests": [{"input": [1, 2], "output": 3}, {"input": [2, 2], "output": 4}]}
SUM = {"tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 2", "stdout": "4"}]}

SETUP = """
create table t(name text, price real, photo blob);
insert into t values ('a', 1.5, x'00ff'), ('b', 2.0, null), ('c;d', 1.5, x'');
"""


@pytest.mark.real
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


@pytest.mark.real
def test_programs_are_run_and_their_lines_compared():
    source = "a, b = map(int, input().split())\nprint(a + b, '')"
    assert python_tests(source, SUM) == 1.0
    assert python_tests("print(3)", SUM) == 0.5
    assert python_tests("print(3)", SUM, share=False) == 0.0
    assert python_tests("print(3)\nprint(3)", SUM) == 0.0
    assert python_tests(source + "\nexit(1)", SUM) == 0.0
    assert python_tests(source, {"tests": json.dumps(SUM["tests"])}) == 1.0


@pytest.mark.real
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


def query_task(query):
    return {"setup": SETUP, "query": query}


@pytest.mark.real
@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("select name from t", "select name from t order by name desc", 1.0),
        ("select name from t order by name", "select name from t order by name desc", 0.0),
        ("select name from t order by name", "So:\n```sql\nSELECT name AS n FROM t ORDER BY 1;\n```\nDone.", 1.0),
        ("select count(*) from t", "select 3.0", 1.0),
        ("select price from t", "select distinct price from t", 0.0),
        ("select photo from t", "select photo from t", 1.0),
        ("select avg(price) from t", "select sum(price) / 3 from t", 1.0),
        ("select 9e999", "select -9e999", 0.0),
        ("select name from t where 0", "select name from t where price > 9", 1.0),
        ("select name from t", "select nothing from t", 0.0),
        ("select name from t", "drop table t", 0.0),
        ("select name from t", "delete from t", 0.0),
        ("select name from t", "select name from t; select 1", 0.0),
        ("select name from t", "attach '/usr/x' as x", 0.0),
        ("select name from t", "select load_extension('/tmp/x')", 0.0),
        ("select name from t", "", 0.0),
        ("select 1", "select '1'", 0.0),
        ("select 1", "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n", 0.0),
    ],
)
def test_a_query_scores_if_its_rows_are_those_of_the_rows_own(gold, response, reward):
    assert sql_result(response, query_task(gold), budget_s=3.0) == reward


@pytest.mark.real
def test_a_rows_own_query_that_fails_is_the_datas_fault():
    with pytest.raises(ValueError, match=r"own query fails.*no such column"):
        sql_result("select 1", query_task("select nope from t"))
    with pytest.raises(ValueError, match="where SQL is due"):
        sql_result("select 1", {"query": "select 1"})


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("select a from t order by a", True),
        ("SELECT a FROM t ORDER\n BY a LIMIT 3", True),
        ("select a from (select a from t order by a)", False),
        ("select rank() over (order by a) from t", False),
        ("select 'order by' from t -- order by", False),
        ('select "order by" from t /* order by */', False),
        ("select reorder, by from t", False),
    ],
)
def test_an_order_counts_if_it_is_the_whole_querys(query, ordered):
    assert is_ordered(query) is ordered


def test_rows_are_a_bag_unless_they_have_an_order():
    assert same_rows([[1], [1], [2]], [[2], [1], [1.0]], in_order=False)
    assert not same_rows([[1], [1], [2]], [[2], [2], [1]], in_order=False)
    assert not same_rows([[1], [2]], [[2], [1]], in_order=True)
    assert same_rows([[0.1 + 0.2]], [[0.3]], in_order=True)
