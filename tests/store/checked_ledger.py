"""A ledger whose every event is held to its effects: what has become possible must have been named, so that nobody in
a store waits for ever, and what has ended must be freed."""

import functools
from collections.abc import Callable
from typing import Any

from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.residents import Effects

EVENTS = (
    "admit", "write", "drop", "release", "abandon", "expire", "lost", "lease_shared", "complete_shared", "served",
    "settle", "catch_up",
)  # fmt: skip


class View:
    """What callers of a store wait for, and whose values are there."""

    def __init__(self, ledger: Ledger) -> None:
        residents, rounds = ledger.residents, ledger.rounds
        stages = residents.readiness.stages
        self.free = {group.id: list(group.free) for group in residents.groups.values()}
        self.open = {lease.id: (lease.stage, dict(lease.open)) for lease in residents.leases.held.values()}
        self.may_form = [rounds.may_form(stage) for stage in stages]
        self.rounds = [
            {(made.number, made.ended, made.void) for made in rounds.by_lease.values() if made.stage == stage.name}
            for stage in stages
        ]
        self.formed = rounds.formed
        self.train = residents.train.index if residents.train is not None else 0
        self.refused = residents.credits.refusal(0, len(residents.waiting)) is not None
        self.live = {group.id: group.live for group in residents.groups.values()}
        self.have = {group.id: dict(enumerate(group.have)) for group in residents.groups.values()}
        self.column_index = residents.readiness.column_index
        self.next_group = residents.next_group
        self.last = {row // residents.size for row in rounds.last_batch}


def check(before: View, after: View, effects: Effects, all_rows: int) -> None:
    """Raise `AssertionError` for what the effects of an event leave out, or free too soon."""
    for group, masks in after.free.items():
        for stage, mask in enumerate(masks):
            known = before.free[group][stage] if group in before.free else 0
            assert not mask & ~known or effects.stages >> stage & 1, f"stage {stage}: group {group} is free, unsaid"
    for lease, (stage, rows) in before.open.items():
        left = after.open.get(lease, (stage, {}))[1]
        shrank = any(left.get(group, 0) != mask for group, mask in rows.items())
        assert not shrank or effects.stages >> stage & 1, f"stage {stage}: lease {lease} holds less, unsaid"
    for stage, may in enumerate(after.may_form):
        said = (effects.stages | effects.rounds) >> stage & 1
        assert before.may_form[stage] or not may or said, f"stage {stage}: a round can be formed, unsaid"
        remembered = {number for number, _, _ in after.rounds[stage]}
        moved = {one for one in before.rounds[stage] if one[0] in remembered} != after.rounds[stage]
        assert not moved or effects.rounds >> stage & 1, f"stage {stage}: a round moved, unsaid"
    assert before.formed == after.formed or effects.rounds >> after.train & 1, "a batch was formed or undone, unsaid"
    assert not before.refused or after.refused or effects.credits, "a group may be admitted, unsaid"
    ended = {group: mask & ~after.live.get(group, 0) for group, mask in before.live.items()}
    expected = {group: mask for group, mask in ended.items() if mask and group not in after.last}
    come = range(before.next_group, after.next_group)  # and perhaps gone: they had ended in a store before this one
    expected |= {group: all_rows for group in (*before.live, *come) if group not in after.live}
    freed: dict[int, int] = {}
    for group, mask in effects.freed:
        freed[group] = freed.get(group, 0) | mask
    assert freed == expected, f"freed {freed}, ended {expected}"
    absent = {
        group: lost
        for group, have in after.have.items()
        if (lost := {c: gone for c, mask in before.have.get(group, {}).items() if (gone := mask & ~have[c])})
    }
    cleared = {group: {after.column_index[name]: mask for name, mask in by.items()} for group, by in effects.cleared}
    cleared = {group: columns for group, columns in cleared.items() if group in after.have}
    assert cleared == absent, f"cleared {cleared}, gone {absent}"


class CheckedLedger(Ledger):
    """A ledger whose events return their results without the effects, which have been checked. `freed`: all that was
    freed so far."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.freed: list[tuple[int, int]] = []


def _checked(name: str) -> Callable[..., Any]:
    event = getattr(Ledger, name)

    @functools.wraps(event)
    def call(self: CheckedLedger, *arguments: Any, **options: Any) -> Any:
        before = View(self)
        outcome = event(self, *arguments, **options)
        result, effects = outcome if isinstance(outcome, tuple) else (None, outcome)
        check(before, View(self), effects, self.residents.all_rows)
        self.freed += effects.freed
        return result

    return call


for _name in EVENTS:
    setattr(CheckedLedger, _name, _checked(_name))
