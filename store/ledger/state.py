"""The ledger's state as plain data: scalars, and values of each group. For snapshots.

The cut is as if every lease had just been given back, so it can be restored for other workers, and other numbers of
them. A batch that is formed but not yet trained by all ranks is formed again: the process that restores the ledger
restores the weights from before that step as well.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from penstock.store.ledger.effects import Effects
from penstock.store.ledger.group import Group
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.losses import NODE_LOST, lacks_source


def scalars(ledger: Ledger) -> dict[str, Any]:
    residents, rounds = ledger.residents, ledger.rounds
    under_way = sum(not (made.ended or made.void) for made in rounds.batches())
    return {
        "next_group": residents.next_group,
        "next_lease": residents.leases.next_id,
        "formed": rounds.formed - under_way,
        "published": residents.credits.published,
        "credits_due": {str(version): groups for version, groups in residents.credits.due.items()},
        "staleness_max": rounds.staleness_max,
        "counters": dict(residents.counters),
        "past": {str(group): list(ended) for group, ended in residents.past.items()},
        "waits": {stage.name: [stage.waited_s, stage.num_taken] for stage in residents.readiness.stages},
    }


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
    residents.credits.published = values["published"]
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
