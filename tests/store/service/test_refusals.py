"""What the store refuses, by name: nothing has changed then."""

from typing import Any

import numpy as np
import pytest

from penstock.store.client.store_client import StoreClient
from penstock.store.errors import (
    DuplicateRow,
    MissingColumn,
    NotFinite,
    RowNotLeased,
    StoreError,
    TooLarge,
    UnknownColumn,
    UnknownRow,
    UnknownStage,
    WrongLength,
    WrongType,
)
from penstock.store.service.snapshot import scalars, values_of
from penstock.store.service.store import Store
from tests.store.driver import living_groups
from tests.store.players import group, response, run


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([{"prompt_ids": [1]}], MissingColumn, "group 0 of 1 lacks column 'task'"),
        ([group() | {"promt": 1}], UnknownColumn, "no column 'promt'"),
        ([group(), group() | {"prompt_ids": 7}], WrongType, "'prompt_ids', row 1: got 7; it must be int32"),
        (
            [group() | {"prompt_ids": [1.5]}],
            WrongType,
            r"'prompt_ids', row 0: got float64 in \[1.5\]; it must be int32",
        ),
        ([group() | {"prompt_ids": [2**40]}], WrongType, "'prompt_ids', row 0"),
        ([group() | {"task": {"a": 1}}], WrongType, "'task', row 0"),
        ([group() | {"prompt_ids": [1] * 3000}], TooLarge, "a group of .* bytes exceeds store.max_bytes=10000"),
    ],
)
def test_bad_groups_are_refused_by_name(groups: list[dict[str, Any]], error: type[StoreError], message: str) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        before = state_of(store)
        with pytest.raises(error, match=message):
            await client.put_groups(groups)
        assert state_of(store) == before

    run(body, max_bytes=10_000)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"novelty": [1.0, 2.0]}, UnknownColumn, "'novelty', which the dataflow lacks"),
        ({"finish_reason": ["stop"]}, WrongLength, "'finish_reason' has 1 values for 2 rows"),
        ({"finish_reason": ["stop", None]}, WrongType, "'finish_reason', row 1: None is no value in None"),
        ({"finish_reason": ["stop", 3]}, WrongType, "'finish_reason', row 1: .* in 3; it must be string"),
        (
            {"reward": [[0.5, 1.0], [0.5]]},
            WrongType,
            r"'reward', row 0: .*; it must be float32. Declare Column\(\"reward\", \"float32\", shape=\"token\"\)",
        ),
        ({"response_ids": [[0, 1], [0, 1.5, 2]]}, WrongType, "'response_ids', row 1: got float64"),
        ({"response_ids": [np.zeros(2), np.zeros(3)]}, WrongType, "'response_ids', row 0: got float64 in"),
        (
            {"response_ids": "ab"},
            WrongType,
            "'response_ids', row 0: got 'a'; it must be int32, one for each response token",
        ),
        ({"behavior_logprobs": [[0.0, 0.0], [0.0, float("nan"), 0.0]]}, NotFinite, "'behavior_logprobs', row 1: nan"),
        ({"behavior_logprobs": [[0.0, float("-inf")], [0.0] * 3]}, NotFinite, "'behavior_logprobs', row 0: -inf"),
        (
            {"token_versions": [[0], [0, 0, 0]]},
            WrongLength,
            "'token_versions', row 0: 1 entries, but 'response_ids' has 2",
        ),
        ({"reward": [1.0, 2.0]}, UnknownColumn, "stage 'rollout' may not write column 'reward'"),
        ({"response_text": ["x", "y" * 10_000]}, TooLarge, "row 1 has .* bytes, more than store.max_bytes=10000"),
    ],
)
def test_bad_results_are_refused_by_column_and_row(
    change: dict[str, Any], error: type[StoreError], message: str
) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await client.lease("rollout", 1, "engine")
        before = state_of(store)
        with pytest.raises(error, match=message):
            await client.write(lease, [0, 1], response(2) | change)
        assert state_of(store) == before
        await client.write(lease, [0, 1], response(2))  # the good ones are taken all the same

    run(body, max_bytes=10_000)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 99], UnknownRow, "row 99: no such row was ever admitted; rows so far are 0 to 3"),
        ([0, 0], DuplicateRow, "a row comes twice in one write of 2 rows"),
        ([0, 2], RowNotLeased, "does not hold row 2"),
    ],
)
def test_rows_that_are_not_the_leases_are_refused(rows: list[int], error: type[StoreError], message: str) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(), group(1)])
        lease = await client.lease("rollout", 1, "engine")
        before = state_of(store)
        with pytest.raises(error, match=message):
            await client.write(lease, rows, response(2))
        assert state_of(store) == before

    run(body)


def test_rows_of_a_finished_group_are_not_taken_again() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(), group(1)])
        lease = await client.lease("rollout", 1, "engine")
        await client.drop(lease, [0, 1], "too_long")
        await client.lease("rollout", 1, "engine")
        before = state_of(store)
        await client.write(lease, [0, 1], response(2))  # late, and there is nothing left to do
        assert state_of(store) | {"late": 0} == before | {"late": 0}
        assert store.ledger.counters["ignored/late"] == 2

    run(body)


def state_of(store: Store) -> dict[str, Any]:
    """All that a call can change, but for the counters of what was refused."""
    numbers = scalars(store.ledger)
    ignored = ("ignored/", "refused/", "producer_waits/")
    leases = store.ledger.residents.leases.held
    return numbers | {
        "counters": {name: count for name, count in numbers["counters"].items() if not name.startswith(ignored)},
        "waits": [taken for _, taken in numbers["waits"].values()],
        "groups": [values_of(group, store.ledger.spec.group_size) for group in living_groups(store.ledger)],
        "free": [(stage.name, stage.num_free) for stage in store.ledger.residents.readiness.stages],
        "leases": {lease.id: (dict(lease.open), dict(lease.granted)) for lease in leases.values()},
        "bytes": (store.ledger.residents.credits.bytes, store.blocks.bytes, store.blocks.num_blocks),
    }


def test_unknown_names_suggest_the_nearest() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        with pytest.raises(UnknownStage, match="did you mean 'reward'"):
            await client.lease("rewards", 1, "judge")
        with pytest.raises(UnknownColumn, match="not in the dataflow"):
            await client.last_batch(["novelty"])

    run(body)
