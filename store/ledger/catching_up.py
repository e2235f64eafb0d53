"""Catching up of a store that goes on from a snapshot in another one's place: it is told what was trained since.

    snapshot ── steps s + 1 … n were trained ──▶ the store dies        restore(snapshot) ─▶ catch_up(steps s + 1 … n)

A step that was under way meanwhile may be told later, before the next batch is formed.
What was trained ends, as if it had been trained here. What was not comes again: it is as it was when the snapshot was
taken, or is admitted again under its number, and sampled with its seed. Groups are trained in order, so one that was
passed by more than the window allows had been dropped: it ends as `dropped/store_lost`, since its reason is lost too.
With a window of more than one group, such a group near the end may be made again.
"""

from collections.abc import Sequence

from penstock.store.errors import StoreError
from penstock.store.ledger.effects import Effects
from penstock.store.ledger.group import Group, masks_of, spans_of
from penstock.store.ledger.residents import Residents
from penstock.store.ledger.rounds import Rounds

STORE_LOST = "store_lost"


def catch_up(residents: Residents, rounds: Rounds, steps: Sequence[Sequence[int]], effects: Effects) -> None:
    """Apply `steps`: row ids that were trained in each step after the last that is known, in order. Raises `StoreError`
    while a batch is under way."""
    if steps and any(not (made.ended or made.void) for made in rounds.batches()):
        raise StoreError(
            f"the batch of step {rounds.formed} is under way: steps that were trained elsewhere come first."
        )
    if residents.train is not None and steps:
        effects.rounds |= 1 << residents.train.index
    ended: dict[int, tuple[int, int]] = {}
    for rows in steps:
        rounds.formed += 1
        for group, mask in masks_of(spans_of(rows, residents.size)).items():
            ended[group] = mask, rounds.formed
        residents.counters["batches_formed"] += 1
        residents.counters["batches_trained"] += 1
    for group in _passed_by(sorted(ended), residents.spec.window, sorted(residents.waiting), residents.next_group):
        if group not in residents.past:
            ended[group] = 0, rounds.formed
    for number in sorted(ended):
        if number in residents.groups:
            end(residents, residents.groups[number], *ended[number], effects)
        elif number >= residents.next_group:
            residents.past[number] = ended[number]


def end(residents: Residents, group: Group, trained: int, version: int, effects: Effects) -> None:
    """End a group. `trained`: the rows of it that were trained, by the step that made `version`; others had been
    dropped."""
    residents.drop(group, group.live & ~trained, STORE_LOST, effects)
    if not group.live:
        return
    residents.waiting.discard(group.id)
    residents.end_trained(group, effects)
    residents.credits.trained(version, 1)
    residents.forget(group, effects)


def _passed_by(trained: Sequence[int], window: int, waiting: Sequence[int], next_group: int) -> list[int]:
    """Groups that are not trained, while `window` or more groups after them were. `trained`, `waiting`: ascending;
    groups from `next_group` on are not admitted yet."""
    if len(trained) < window:
        return []
    last = trained[-window]
    """The first group that may wait: no group before it does."""
    known = set(trained)
    new = range(next_group, last)
    return [group for group in (*waiting, *new) if group < last and group not in known]
