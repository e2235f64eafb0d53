"""The ledger's state as plain data, for snapshots: its scalars, and its living groups, copied while it goes on.

    cut = LedgerCut(residents, kept)   the moment; costs the same however many groups there are
    while cut.copy(500): …       the groups that have not changed since, some at a time, between any events
                                 one that is about to change is copied first (`Residents.changing`)

The cut is as if every lease had just been given back, so it can be restored for other workers, and other numbers of
them. A batch that is formed but not yet trained by all ranks is formed again: the process that restores the ledger
restores the weights from before that step as well. Pure; `service/saving.py` drives it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from penstock.store.ledger.effects import Effects
from penstock.store.ledger.group import Group
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.lost_values import NODE_LOST, lacks_source
from penstock.store.ledger.residents import Residents


class LedgerCut:
    """A copy of the groups, without leases and without what is free. Lifecycle: made at its moment, `copy` until
    nothing is left or `close`; then it costs the ledger nothing more."""

    def __init__(self, residents: Residents, kept: Callable[[int], None] = lambda group: None) -> None:
        """Begin at this moment. `kept`: called with each group's number when it is copied, before it changes."""
        self._residents, self._kept = residents, kept
        self._first, self._end = next(iter(residents.groups), residents.next_group), residents.next_group
        self._next = self._first
        self._copied: dict[int, Group] = {}
        self._lacking: set[int] = set()
        residents.watchers.append(self._keep)

    def copy(self, count: int) -> bool:
        """Copy the groups of so many numbers more. Returns whether any numbers are left."""
        end = min(self._end, self._next + count)
        groups = self._residents.groups
        for number in range(self._next, end):
            if (group := groups.get(number)) is not None:
                self._keep(group)
        self._next = end
        if end == self._end:
            self.close()
        return end < self._end

    def close(self) -> None:
        """Copy no more. A second time changes nothing."""
        if self._keep in self._residents.watchers:
            self._residents.watchers.remove(self._keep)

    @property
    def groups(self) -> list[Group]:
        """The copied groups, by number. For any thread, once all are copied: sorting would keep Python's lock too
        long."""
        return [self._copied[number] for number in range(self._first, self._end) if number in self._copied]

    @property
    def with_source(self) -> list[int]:
        """Numbers of the copied groups that have the source's values, ascending."""
        copied, lacking = self._copied, self._lacking
        return [number for number in range(self._first, self._end) if number in copied and number not in lacking]

    def _keep(self, group: Group) -> None:
        if not group.live or not self._next <= group.id < self._end or group.id in self._copied:
            return
        self._copied[group.id] = group.copy()
        if lacks_source(self._residents, group):
            self._lacking.add(group.id)
        self._kept(group.id)


def scalars(ledger: Ledger) -> dict[str, Any]:
    residents, rounds = ledger.residents, ledger.rounds
    under_way = sum(not (made.ended or made.void) for made in rounds.batches())
    return {
        "next_group": residents.next_group,
        "next_lease": residents.leases.next_id,
        "formed": rounds.formed - under_way,
        "served": residents.credits.served_version,
        "credits_due": {str(version): groups for version, groups in residents.credits.due.items()},
        "staleness_max": rounds.staleness_max,
        "counters": dict(residents.counters),
        "past": {str(group): list(ended) for group, ended in residents.past.items()},
        "outcomes": None if residents.outcomes is None else residents.outcomes.as_values(_first_asked(residents)),
        "waits": {stage.name: [stage.waited_s, stage.num_taken] for stage in residents.readiness.stages},
    }


def _first_asked(residents: Residents) -> int:
    """The oldest group whose outcome a source may still ask for: it asks a step before it draws, and may lag."""
    spec = residents.spec
    return residents.next_group - spec.max_active_groups - 2 * spec.groups_per_step - spec.window


def values_of(group: Group, size: int) -> dict[str, Any]:
    """State of a group. `size`: samples of a group. Masks are little-endian bytes, one bit a sample."""
    width = (size + 7) // 8
    return {
        "id": group.id,
        "live": group.live.to_bytes(width, "little"),
        "have": [mask.to_bytes(width, "little") for mask in group.have],
        "done": [mask.to_bytes(width, "little") for mask in group.done],
        "prompt_tokens": group.prompt_tokens,
        "shared_bytes": group.shared_bytes,
        "oldest": group.oldest,
        "response_tokens": group.response_tokens,
        "context_tokens": group.context_tokens,
        "row_bytes": group.row_bytes,
    }


def restore(ledger: Ledger, values: dict[str, Any], groups: Iterable[dict[str, Any]]) -> None:
    """Let an empty ledger go on from a state, all of its rows free or done. Its own bounds hold, and may differ."""
    spec, residents = ledger.spec, ledger.residents
    residents.next_group, residents.leases.next_id = values["next_group"], values["next_lease"]
    residents.counters = ledger.counters = Counter(values["counters"])
    residents.past = {int(group): (mask, version) for group, (mask, version) in values.get("past", {}).items()}
    if residents.outcomes is not None and values.get("outcomes"):
        residents.outcomes.restore(values["outcomes"])
    residents.credits.served_version = values["served" if "served" in values else "published"]  # so in older ones
    residents.credits.due = {int(version): groups for version, groups in values["credits_due"].items()}
    residents.credits.active = sum(residents.credits.due.values())
    ledger.rounds.formed, ledger.rounds.staleness_max = values["formed"], values["staleness_max"]
    for stage in residents.readiness.stages:
        stage.waited_s, stage.num_taken = values["waits"].get(stage.name, (0.0, 0))
    for row in groups:
        group = Group(row["id"], spec.group_size, len(spec.columns), len(spec.stages))
        group.live = int.from_bytes(row["live"], "little")
        group.have = [int.from_bytes(mask, "little") for mask in row["have"]]
        group.done = [int.from_bytes(mask, "little") for mask in row["done"]]
        group.prompt_tokens, group.shared_bytes = row["prompt_tokens"], row["shared_bytes"]
        group.oldest, group.response_tokens = row["oldest"], row["response_tokens"]
        group.context_tokens = row.get("context_tokens") or group.context_tokens  # older snapshots have none
        group.row_bytes[: len(row["row_bytes"])] = row["row_bytes"]  # older snapshots have one number a sample
        residents.resume(group, Effects())  # nobody waits yet
        if lacks_source(residents, group):
            residents.drop(group, group.live, NODE_LOST, Effects())
    residents.head = min(residents.waiting, default=residents.next_group)
