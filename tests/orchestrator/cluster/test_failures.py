"""Where several calls fail, the failure that caused the others is told."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import (
    DataError,
    DeadlineExceeded,
    LeaseExpired,
    PartnerGone,
    PenstockError,
    RewardFailure,
    WorkerDied,
    WorkerFailed,
)
from penstock.orchestrator.cluster.ray_calls import MAX_OTHERS, cause_of, held_back, is_cause, leaves
from penstock.store.errors import RowsLost, RowsUnreachable, StoreClosed, StoreUnreachable

ORDER = [
    [DataError("row 3"), RewardFailure("all"), WorkerFailed("Compute failed with KeyError"), KeyError("a bug")],
    [WorkerDied("Rollout-0 has died")],
    [DeadlineExceeded("step 3"), LeaseExpired("lease 7")],
    [
        PartnerGone("another rank is gone"),
        StoreClosed("the store is closed"),
        StoreUnreachable("the store at 10.0.0.1 is silent"),
        RowsUnreachable("rows on node b"),
        RowsLost("rows of round 3"),
    ],
]
"""Earlier ones make later ones."""


@pytest.mark.parametrize(
    ("earlier", "later"),
    [(one, other) for i, ones in enumerate(ORDER) for others in ORDER[i + 1 :] for one in ones for other in others],
)
def test_the_cause_is_told_whatever_came_first(earlier: Exception, later: Exception) -> None:
    for failures in ([earlier, later], [later, earlier]):
        found = cause_of(failures)
        assert type(found) is type(earlier)
        assert str(earlier) in str(found)


OWN = [error for errors in ORDER for error in errors if isinstance(error, PenstockError)]


@given(st.lists(st.sampled_from(OWN), min_size=1))
def test_every_failure_is_named_or_counted(failures: list[PenstockError]) -> None:
    first, *rest = str(found := cause_of(failures)).splitlines()
    assert is_cause(found) == any(is_cause(error) for error in failures)
    named = [line for line in rest[1:] if not line.endswith(" more")]
    more = sum(int(line.split()[1]) for line in rest[1:] if line.endswith(" more"))
    assert len(named) <= MAX_OTHERS
    assert 1 + len(named) + more == len(set(failures))
    assert {first, *(line.partition(": ")[2] for line in named)} <= {str(error) for error in failures}


def test_others_are_one_short_line_each_and_few() -> None:
    others = [PartnerGone(f"rank {i}: another rank is gone\n  File x\n  File y" + "z" * 900) for i in range(9)]
    lines = str(cause_of([*others, WorkerDied("Trainer-1 has died\nSee its log.")])).splitlines()
    assert lines[:3] == ["Trainer-1 has died", "See its log.", "What failed with it:"]
    assert lines[3] == "  PartnerGone: rank 0: another rank is gone"
    assert lines[-1] == f"  and {9 - MAX_OTHERS} more"
    assert len(lines) == 3 + MAX_OTHERS + 1
    assert all(len(line) < 250 for line in lines)


def test_one_failure_is_told_alone_even_if_heard_of_twice() -> None:
    error = DataError("row 3")
    assert cause_of([error]) is error
    assert cause_of([error, error, DataError("row 3")]) is error


def test_an_error_of_the_controllers_own_keeps_its_type_and_traceback() -> None:
    error = KeyError("step")
    assert cause_of([PartnerGone("the store's process is gone"), error]) is error
    assert any("the store's process is gone" in note for note in error.__notes__)


def test_the_leaves_of_a_group_of_groups_are_all_that_failed() -> None:
    one, other, third = DataError("1"), WorkerDied("2"), KeyError("3")
    assert leaves(BaseExceptionGroup("", [ExceptionGroup("", [one, other]), third])) == [one, other, third]


async def fails(error: Exception, happened: asyncio.Event | None = None) -> None:
    if happened is not None:
        await happened.wait()
    raise error


async def group_of(*works: object, grace_s: float) -> list[Exception]:
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(held_back(work, grace_s))  # type: ignore[arg-type]
    except ExceptionGroup as group:
        return leaves(group)
    return []


def test_a_consequence_waits_in_a_task_group_until_its_cause_has_failed_too() -> None:
    async def scenario() -> list[Exception]:
        late = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, late.set)
        return await group_of(fails(PartnerGone("rank 1")), fails(DataError("row 3"), late), grace_s=600)

    found = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert {type(error) for error in found} == {PartnerGone, DataError}
    assert isinstance(cause_of(found), DataError)


@pytest.mark.parametrize(("error", "grace_s"), [(WorkerDied("gone"), 600.0), (DeadlineExceeded("step 1"), 0.01)])
def test_a_failure_without_another_ends_the_group_at_once_or_after_the_grace(
    error: PenstockError, grace_s: float
) -> None:
    never = asyncio.sleep(3600)
    assert asyncio.run(asyncio.wait_for(group_of(fails(error), never, grace_s=grace_s), 60)) == [error]
