"""Losses of values with the node that had them: what must be made again, from the earliest column that is lost.

    cells that are gone ─ group_loss ─▶ columns that go with them, rows that stages compute again ─▶ leased again

A value is never joined with one that was computed from another value: with a column go all columns that were computed
from it, the other columns that its stage wrote for the row, and the work of every client that holds a lease on the row
and has read them. Groups keep their number, so their place in the order and the bound of their staleness stay; a row
that is sampled again is so under the version that is served then, which is no older.

- *Rows of no batch* are free again for the earliest stage that has lost something.
- *Rows of a batch under way* may all be with the ranks already, which then train them: nothing starts on them, and they
  are given to no client, until the batch has ended or was released. Released at once, they could be trained twice.
- *Rows of the batch trained last* are shown no more.
- *Groups without a column of the source* cannot be made again, and are dropped as `node_lost`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.store.ledger.group import Group, bits
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Effects, Residents

LostCells = Mapping[int, Mapping[str, int]]
"""Mask of a group's rows, by group and column."""
NODE_LOST = "node_lost"
"""The reason with which groups are dropped."""


@dataclass(frozen=True)
class GroupLoss:
    """The loss of a group, with everything that follows."""

    columns: list[int]
    """Rows whose value goes, by column."""
    stages: list[int]
    """Rows that a stage has to compute again, whether it has begun with them, is done, or neither, by stage."""

    @property
    def rows(self) -> int:
        return _union(self.columns)


def group_loss(group: Group, gone: list[int], stages: Iterable[StageQueue], source: Iterable[int]) -> GroupLoss:
    """Work out a group's loss. `gone`: by column, rows whose value is gone. `source`: columns that no stage makes.

    With `response_ids` of sample 1 go its other columns of the rollout, its reward, and the advantages of the whole
    group, which were computed from all its rewards:

        group_loss(group, [0, 0b10, 0, 0], ...)  # of prompt_ids, response_ids, reward, advantage
        # GroupLoss(columns=[0, 0b10, 0b10, 0b11], stages=[0b10, 0b10, 0b11])
    """
    worked = [stage for stage in stages if stage.unit != "batch"]
    columns = [mask & have & group.live for mask, have in zip(gone, group.have, strict=True)]
    again = [0] * len(group.done)
    if any(columns[index] for index in source):
        for stage in worked:
            again[stage.index] = group.live
        return GroupLoss([have & group.live for have in group.have], again)
    grows = True
    while grows:
        grows = False
        for stage in worked:
            rows = _union(columns[index] for index in (*stage.reads, *stage.writes))
            if rows and stage.sees_siblings:
                rows = group.live
            if rows & ~again[stage.index]:
                grows = True
                again[stage.index] |= rows
                for column in stage.writes:
                    columns[column] |= rows & group.have[column]
    return GroupLoss(columns, again)


def lose_cells(residents: Residents, cells: LostCells, effects: Effects) -> None:
    """Give up these cells, whose values are gone. Groups that have ended and values that are not there are passed
    over."""
    holders: dict[int, list[HeldLease]] = {}
    for lease in residents.leases.held.values():
        for group_id in lease.granted:
            if group_id in cells:
                holders.setdefault(group_id, []).append(lease)
    for group_id, by_name in cells.items():
        group = residents.groups.get(group_id)
        if group is None:
            continue
        residents.before_change(group)
        gone = [by_name.get(name, 0) & group.have[index] for name, index in residents.readiness.column_index.items()]
        if not group.live:
            group.lost |= _union(gone)
            _clear(residents, group, gone, effects)
            continue
        loss = group_loss(group, gone, residents.readiness.stages, residents.source)
        if not loss.rows:
            continue
        if group.trained_in is None and any(loss.columns[index] for index in residents.source):
            residents.drop(group, group.live, NODE_LOST, effects)
            continue
        if group.trained_in is not None:
            group.lost |= loss.rows
        for lease in holders.get(group_id, ()):
            _revoke(residents, lease, group, loss.stages[lease.stage], effects)
        _reset_stages(residents, group, loss.stages, effects)
        _clear(residents, group, loss.columns, effects)
        effects.stages |= residents.readiness.refresh_all(group)


def restart_group(residents: Residents, group: Group, effects: Effects) -> None:
    """Let a group whose batch was released begin again: what it has lost meanwhile is made again, if it can be."""
    if lacks_source(residents, group):
        residents.drop(group, group.live, NODE_LOST, effects)
    elif group.lost:
        group.lost = 0
        effects.stages |= residents.readiness.refresh_all(group)


def lacks_source(residents: Residents, group: Group) -> bool:
    """Return whether the source's values of a group are gone: it is in a batch under way, or was when a snapshot was
    taken."""
    return any(group.live & ~group.have[column] for column in residents.source)


def _revoke(residents: Residents, lease: HeldLease, group: Group, mask: int, effects: Effects) -> None:
    """Revoke rows of a lease, which go to another: what its owner still says of them is ignored, as of a lease that is
    over."""
    mask &= lease.granted[group.id]
    if not mask:
        return
    lease.revoked[group.id] = lease.revoked.get(group.id, 0) | mask
    if held := lease.open.get(group.id, 0) & mask:
        stage = residents.readiness.stages[lease.stage].name
        residents.counters[f"revoked/{stage}"] += held.bit_count()
        residents.unhold(lease, group, held, effects)


def _reset_stages(residents: Residents, group: Group, again: list[int], effects: Effects) -> None:
    """Undo the stages' work on these rows: none is done with them, nor has any written a byte of them."""
    for stage in residents.readiness.stages:
        mask = again[stage.index]
        if undone := mask & group.done[stage.index]:
            residents.counters[f"lost/{stage.name}"] += undone.bit_count()
            group.done[stage.index] &= ~undone
            stage.done_rows -= undone.bit_count()
        first = stage.index * residents.size
        for index in bits(mask):
            residents.credits.bytes -= group.row_bytes[first + index]
            group.row_bytes[first + index] = 0
    effects.credits = True


def _clear(residents: Residents, group: Group, columns: list[int], effects: Effects) -> None:
    """Remove values. What the ledger noted of a value (tokens, versions) stays: it is noted anew with the next one."""
    names = residents.readiness.column_index
    cleared = {name: columns[index] for name, index in names.items() if columns[index]}
    for name, mask in cleared.items():
        group.have[names[name]] &= ~mask
    if cleared:
        effects.cleared.append((group.id, cleared))


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
