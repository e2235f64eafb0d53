"""Outcomes of groups: known once each sample has a reward or is gone, and asked for by the source alone."""

import asyncio
import math

import pytest

from penstock.store.client.store_client import StoreClient
from penstock.store.errors import StoreError
from penstock.store.ledger.group import Group
from penstock.store.ledger.outcomes import Outcomes, outcome_of
from penstock.store.service.store import Store
from tests.store.players import group, leased, run, values_of


def resident(live: int = 0b111) -> Group:
    made = Group(0, 3, 0, 0)
    made.live = live
    return made


def test_an_outcome_is_mean_and_standard_deviation() -> None:
    assert outcome_of([0.0, 1.0, 1.0, 0.0]) == (0.5, 0.5)
    assert outcome_of([2.0, None, 2.0]) == (2.0, 0.0)
    assert outcome_of([0.0, 0.0, 3.0]) == pytest.approx((1.0, math.sqrt(2)))
    assert outcome_of([None]) is None


def test_it_is_known_once_every_living_sample_has_a_reward() -> None:
    outcomes = Outcomes(3)
    outcomes.note(0, 0, 1.0)
    outcomes.note(0, 2, 0.0)
    with pytest.raises(LookupError):
        outcomes.of(0, resident())
    assert outcomes.of(0, resident(0b101)) == (0.5, 0.5)
    outcomes.note(0, 1, 1.0)
    outcomes.note(0, 1, 0.0)  # made again after a loss: the first one stands
    assert outcomes.of(0, resident()) == pytest.approx((2 / 3, math.sqrt(2) / 3))


def test_it_is_remembered_when_the_group_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.ledger.outcomes.MOST_KNOWN", 2)
    outcomes = Outcomes(1)
    for number in range(3):
        outcomes.note(number, 0, float(number))
        outcomes.ended(number)
    outcomes.ended(3)  # without a reward
    assert [outcomes.of(number, None) for number in range(4)] == [None, (1.0, 0.0), (2.0, 0.0), None]
    restored = Outcomes(1)
    restored.restore(outcomes.as_values(first=2))
    assert [restored.of(number, None) for number in range(4)] == [None, None, (2.0, 0.0), None]


def test_the_source_waits_for_rewards_and_for_groups_that_are_not_admitted_yet() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        asked = asyncio.create_task(client.outcomes(0, 3))
        await client.put_groups([group(0), group(1)])
        lease = await leased(client, "rollout", 2)
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        lease = await leased(client, "reward", 4)
        assert await client.outcomes(0, 0) == []
        await client.write(lease, [0, 1], {"reward": [0.0, 1.0]})
        await client.drop(lease, [2], "test")
        await client.write(lease, [3], {"reward": [0.25]})
        assert await client.outcomes(0, 2) == [(0.5, 0.5), (0.25, 0.0)]
        await client.put_groups([group(2)])
        lease = await leased(client, "rollout", 1)
        assert not asked.done()
        await client.drop(lease, lease.rows.row_ids, "test")
        assert await asked == [(0.5, 0.5), (0.25, 0.0), None]

    run(body, keeps_outcomes=True)


def test_who_waits_hears_that_the_store_is_closed() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        asked = asyncio.create_task(client.outcomes(0, 1))
        await asyncio.sleep(0)
        await client.close("test")
        assert await asked is None

    run(body, keeps_outcomes=True)


def test_a_run_without_a_curriculum_keeps_none() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        with pytest.raises(StoreError, match=r"data\.curriculum\.by"):
            await client.outcomes(0, 1)

    run(body)
