"""Workers that play a whole run on stores in this process: every stage from the prompts to the trained batch."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from penstock.store.client.lease import Lease, SharedLease
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants

STAGES = ("rollout", "reward", "reference", "group_advantage")


def run(body: Callable[[Store, StoreClient], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        store = Store(make_spec(**changes))
        await asyncio.wait_for(body(store, StoreClient(store)), 20)
        check_invariants(store.ledger)
        await store.close("test over")

    asyncio.run(main())


def group(number: int = 0) -> dict[str, Any]:
    return {"prompt_ids": [1, 2, 10 + number], "task": f'{{"number": {number}}}'}


async def leased(client: StoreClient, stage: str, max_units: int = 100, owner: str = "", **options: Any) -> Lease:
    """A lease that the client is given. `owner`: the stage's name unless said."""
    lease = await client.lease(stage, max_units, owner or stage, **options)
    assert lease is not None
    return lease


def response(num_rows: int, version: int = 0) -> dict[str, Any]:
    """What a rollout writes: 2, 3, … tokens."""
    lengths = range(2, 2 + num_rows)
    return {
        "response_ids": [list(range(length)) for length in lengths],
        "response_text": ["x" * length for length in lengths],
        "finish_reason": ["stop"] * num_rows,
        "behavior_logprobs": [np.full(length, -0.5, dtype=np.float32) for length in lengths],
        "token_versions": [[version] * length for length in lengths],
    }


def values_of(stage: str, lease: Lease, version: int = 0, more_tokens: int = 0) -> dict[str, Any]:
    """What a stage writes: a pure function of the rows, so that two runs can be compared. `more_tokens`: in every third
    response."""
    ids = lease.rows.row_ids.tolist()
    lengths = [2 + row % 5 + more_tokens * (row % 3 == 0) for row in ids]
    if stage == "rollout":
        return {
            "response_ids": [list(range(row, row + length)) for row, length in zip(ids, lengths, strict=True)],
            "response_text": [f"text {row}" for row in ids],
            "finish_reason": ["stop"] * len(ids),
            "behavior_logprobs": [np.full(length, -0.5, dtype=np.float32) for length in lengths],
            "token_versions": [[version] * length for length in lengths],
        }
    if stage == "reference":
        return {"reference_logprobs": [np.full(length, -0.25, dtype=np.float32) for length in lengths]}
    return {{"reward": "reward", "group_advantage": "advantage"}[stage]: [float(row) for row in ids]}


async def work(
    client: StoreClient, stage: str, owner: str, serves: "Served", max_units: int = 3, more_tokens: int = 0
) -> None:
    async with client.leases(stage, max_units, owner) as leases:
        async for lease in leases:
            values = values_of(stage, lease, serves.version, more_tokens)
            await client.write(lease, lease.rows.row_ids, values)


class Served:
    """The version that the engines have."""

    def __init__(self, version: int = 0) -> None:
        self.version = version


def start_workers(handle: Any, serves: Served, more_tokens: int = 0) -> list["asyncio.Task[None]"]:
    """One of each stage, each with a client of its own and its stage's name."""
    return [
        asyncio.ensure_future(work(StoreClient(handle), stage, stage, serves, more_tokens=more_tokens))
        for stage in STAGES
    ]


async def train(client: StoreClient, round: int, num_ranks: int = 1) -> list[SharedLease]:
    """One update by all ranks, and its publication."""
    leases = await asyncio.gather(*(client.lease_shared("train", round, rank, num_ranks) for rank in range(num_ranks)))
    found = [lease for lease in leases if lease is not None]
    assert len(found) == num_ranks
    for lease in found:
        await client.complete_shared(lease.share)
    return found


def long_responses(lease: Lease, tokens: int) -> dict[str, Any]:
    """What a rollout writes: so many tokens a row, of which each tells its row."""
    ids = lease.rows.row_ids.tolist()
    return values_of("rollout", lease) | {
        "response_ids": [np.full(tokens, row, dtype=np.int32) for row in ids],
        "behavior_logprobs": [np.full(tokens, -row, dtype=np.float32) for row in ids],
        "token_versions": [np.zeros(tokens, dtype=np.int32)] * len(ids),
    }
