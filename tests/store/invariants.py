"""Recomputation from scratch of what the ledger keeps by counting. Tests compare both after every event."""

from penstock.store.ledger.group import Group
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.readiness import free_rows, num_units
from penstock.store.ledger.residents import Residents
from penstock.store.ledger.rounds import Rounds


def check_invariants(ledger: Ledger) -> None:
    """Raise `AssertionError`, with a message that says what contradicts what."""
    residents, rounds = ledger.residents, ledger.rounds
    for group in residents.groups.values():
        _check_group(residents, group)
    _check_readiness(residents)
    _check_leases(residents)
    _check_credits(residents, rounds)
    _check_rows(residents, rounds)
    _check_stragglers(residents)


def _check_group(residents: Residents, group: Group) -> None:
    for stage in residents.readiness.stages:
        where = f"group {group.id}, stage {stage.name!r}"
        leased, done, free = group.leased[stage.index], group.done[stage.index], group.free[stage.index]
        assert free == free_rows(group, stage), f"{where}: free rows {free:b} should be {free_rows(group, stage):b}"
        assert not leased & done, f"{where}: rows {leased & done:b} are leased and done"
        assert not leased & ~group.live, f"{where}: rows {leased & ~group.live:b} are leased and have ended"
        for column in stage.writes:
            assert not done & group.live & ~group.have[column], f"{where}: done without column {column}"
            written = group.have[column] & group.live
            if stage.sees_siblings and written:
                written = group.live
            for read in stage.reads:
                missing = written & ~group.have[read]
                assert not missing, f"{where}: rows {missing:b} have column {column} without {read}, its source"
        queued = bool(group.queued >> stage.index & 1)
        assert queued == (group.id in stage.queue), f"{where}: queued={queued}, but the queue says otherwise"
        assert queued or not free or stage.unit == "batch", f"{where}: free and not queued"


def _check_readiness(residents: Residents) -> None:
    for stage in residents.readiness.stages:
        units = sum(num_units(stage, group.free[stage.index]) for group in residents.groups.values())
        assert stage.num_free == units, f"stage {stage.name!r}: counts {stage.num_free} free units, has {units}"
        for state, counted in (("free", stage.free_rows), ("leased", stage.leased_rows), ("done", stage.done_rows)):
            rows = sum((getattr(one, state)[stage.index] & one.live).bit_count() for one in residents.groups.values())
            assert counted == rows, f"stage {stage.name!r}: counts {counted} {state} rows, has {rows}"
        assert len(set(stage.queue)) == len(stage.queue), f"stage {stage.name!r}: a group is queued twice"


def _check_leases(residents: Residents) -> None:
    held: dict[tuple[int, int], int] = {}
    for lease in residents.leases.held.values():
        assert lease.open, f"lease {lease.id} has no open rows and should have ended"
        for group_id, mask in lease.open.items():
            assert group_id in residents.groups, f"lease {lease.id} holds rows of group {group_id}, which is gone"
            group, key = residents.groups[group_id], (lease.stage, group_id)
            assert not mask & ~lease.granted[group_id], f"lease {lease.id} holds rows it was not granted"
            revoked = mask & lease.revoked.get(group_id, 0)
            assert not revoked, f"lease {lease.id} holds rows {revoked:b} that were revoked"
            may_share = lease.id in residents.stragglers.holders.get(group_id, ())
            twice = 0 if may_share else held.get(key, 0) & mask
            assert not twice, f"group {group_id}: lease {lease.id} holds rows of another lease"
            assert lease.id in (group.holders or ()), f"group {group_id} does not know its lease {lease.id}"
            held[key] = held.get(key, 0) | mask
    for group in residents.groups.values():
        for stage in residents.readiness.stages:
            leased, by_leases = group.leased[stage.index], held.get((stage.index, group.id), 0)
            assert leased == by_leases, f"group {group.id}: rows {leased:b} are leased, leases hold {by_leases:b}"
        for lease_id in group.holders or ():
            assert group.id in residents.leases.held[lease_id].open, f"group {group.id}: ghost lease {lease_id}"
    deadlines = [lease.deadline for lease in residents.leases.held.values() if lease.deadline is not None]
    assert residents.leases.next_deadline() == min(deadlines, default=None), "the next deadline is not the earliest"


def _check_credits(residents: Residents, rounds: Rounds) -> None:
    credits = residents.credits
    unfinished = sum(group.live != 0 for group in residents.groups.values())
    active = unfinished + sum(credits.due.values())
    assert credits.active == active, f"{credits.active} groups are counted active, {active} are"
    assert credits.active <= credits.max_active, f"{credits.active} groups are active, {credits.max_active} may be"
    assert all(version > credits.served_version for version in credits.due), (
        "credits are due for a version that is served"
    )
    nbytes = sum(group.nbytes for group in residents.groups.values())
    assert credits.bytes == nbytes, f"{credits.bytes} bytes are counted, {nbytes} are resident"
    assert credits.served_version <= rounds.formed, "a version is served whose batch was never formed"


def _check_rows(residents: Residents, rounds: Rounds) -> None:
    live = sum(group.live.bit_count() for group in residents.groups.values())
    assert residents.num_rows == live, f"{residents.num_rows} rows are counted alive, {live} are"
    counters = residents.counters
    dropped = sum(count for name, count in counters.items() if name.startswith("dropped/"))
    admitted = residents.next_group * residents.size
    ended = counters["rows_trained"] + dropped
    assert admitted == live + ended, f"{admitted} rows were admitted, {live} live and {ended} have ended"
    waiting = {group.id for group in residents.groups.values() if group.live and group.trained_in is None}
    assert residents.waiting == waiting, f"groups {residents.waiting} are said to wait, {waiting} do"
    assert residents.head <= min(waiting, default=residents.next_group), "a group before the head waits"
    in_batches = {group.id for group in residents.groups.values() if group.trained_in is not None}
    strangers = {group.id for group in residents.groups.values() if group.lost} - in_batches
    assert not strangers, f"groups {strangers} of no batch have lost values and are not made again"
    last = {row // residents.size for row in rounds.last_batch}
    ended_groups = {group.id for group in residents.groups.values() if not group.live}
    assert last == ended_groups, f"ended groups {ended_groups} are resident, the last batch has {last}"


def _check_stragglers(residents: Residents) -> None:
    held = residents.leases.held
    for group_id, holders in residents.stragglers.holders.items():
        assert 1 <= len(holders) <= 2, f"group {group_id} is sampled by {len(holders)} engines"
        for lease_id in holders:
            is_held = lease_id in held and bool(held[lease_id].open.get(group_id))
            assert is_held, f"group {group_id} is said to be sampled under lease {lease_id}, which does not hold it"
