"""Queries are judged by their rows."""

import pytest

from penstock.workers.reward.code import is_ordered, same_rows, sql_result

SETUP = """
create table t(name text, price real, photo blob);
insert into t values ('a', 1.5, x'00ff'), ('b', 2.0, null), ('c;d', 1.5, x'');
"""


def task(query):
    return {"setup": SETUP, "query": query}


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
    assert sql_result(response, task(gold), budget_s=3.0) == reward


def test_a_rows_own_query_that_fails_is_the_datas_fault():
    with pytest.raises(ValueError, match=r"own query fails.*no such column"):
        sql_result("select 1", task("select nope from t"))
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
