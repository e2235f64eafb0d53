"""Who is next: shares hold, nobody starves, an adapter's requests stay together, limits a minute are kept."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.tenants import MOST_TOGETHER, Budget, NextRequest, Schedule
from tests.amounts import amount


def test_tenants_get_tokens_in_proportion_to_their_shares():
    schedule = Schedule({"a": 3.0}, {})
    waiting = [NextRequest("a:0", "a", 100), NextRequest("b:0", "b", 100)]
    served = Counter(schedule.pick(waiting, 0.0).tenant for _ in range(800))
    assert abs(served["a"] - 600) <= MOST_TOGETHER


def test_requests_of_an_adapter_stay_together_up_to_a_bound():
    schedule = Schedule({}, {})
    waiting = [NextRequest("a:0", "a", 1), NextRequest("b:0", "b", 1)]
    picked = [schedule.pick(waiting, 0.0).queue for _ in range(2 * MOST_TOGETHER)]
    assert picked == ["a:0"] * MOST_TOGETHER + ["b:0"] * MOST_TOGETHER


def test_a_tenant_that_rested_has_saved_nothing_up():
    schedule = Schedule({}, {})
    for _ in range(100):
        schedule.pick([NextRequest("a:0", "a", 100)], 0.0)
    both = [NextRequest("a:0", "a", 100), NextRequest("b:0", "b", 100)]
    served = Counter(schedule.pick(both, 0.0).tenant for _ in range(10 * MOST_TOGETHER))
    assert abs(served["a"] - served["b"]) <= MOST_TOGETHER


def test_a_tenant_beyond_its_tokens_a_minute_waits_until_they_come_back():
    schedule = Schedule({}, {"a": Budget(60)})
    mine, other = NextRequest("a:0", "a", 90), NextRequest("b:0", "b", 90)
    assert schedule.pick([mine], 0.0) == mine
    assert schedule.pick([mine], 1.0) is None
    assert schedule.pick([mine, other], 1.0) == other
    assert schedule.opens_in("a", 1.0) == 30.0  # 90 - 60 + 1 tokens at one a second, one of them has come
    assert schedule.pick([mine], 31.0) == mine


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 1000)), min_size=1, max_size=60))
@settings(max_examples=amount(60), deadline=None)
def test_whatever_waits_is_carried_out_once(requests):
    schedule = Schedule({"a": 0.1}, {})
    queues = {}
    for tenant, number, tokens in requests:
        queues.setdefault((f"{tenant}:{number}", tenant), []).append(tokens)
    count = 0
    while queues:
        chosen = schedule.pick([NextRequest(queue, tenant, rest[0]) for (queue, tenant), rest in queues.items()], 0.0)
        rest = queues[chosen.queue, chosen.tenant]
        assert rest.pop(0) == chosen.tokens
        count += 1
        if not rest:
            del queues[chosen.queue, chosen.tenant]
    assert count == len(requests)
