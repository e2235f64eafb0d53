"""Facts of the values that are written, for the ledger: bytes, tokens, oldest versions. Checked, then kept.

The client works them out beside the values (`data/schema.py`), which the ledger never sees.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.conf.errors import suggest
from penstock.store.errors import TooLarge, UnknownColumn, WrongLength
from penstock.store.ledger.group import Group, Span, bits, mask_of, untouched
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Residents


@dataclass(frozen=True)
class Facts:
    """Facts of the rows of a write, for the ledger: lists of one entry a row, None where no column tells."""

    row_bytes: list[int]
    oldest_version: list[int] | None = None
    response_tokens: list[int] | None = None
    prompt_tokens: list[int] | None = None
    token_column: str = ""
    token_lengths: list[int] | None = None
    """Entries of each row of `token_column`, any of the token columns written."""
    context_tokens: list[int] | None = None
    """Tokens of a trajectory that were read and not sampled."""
    rewards: list[float] | None = None


def columns_written(residents: Residents, stage: StageQueue, columns: Sequence[str]) -> Sequence[int]:
    """Numbers of the columns of a write. Raises `UnknownColumn` for those that the stage does not write."""
    if tuple(columns) == stage.spec.writes:
        return stage.writes
    index = residents.readiness.column_index
    for name in columns:
        if name not in index:
            raise UnknownColumn(
                f"stage {stage.name!r} writes column {name!r}, which the dataflow lacks{suggest(name, index)}"
            )
        if index[name] not in stage.writes:
            raise UnknownColumn(
                f"stage {stage.name!r} may not write column {name!r}; it writes "
                f"{', '.join(stage.spec.writes) or 'none'}. Declare the column in the stage's writes."
            )
    return [index[name] for name in columns]


def check_facts(
    residents: Residents, rows: Sequence[int], spans: Sequence[Span], written: Sequence[int], facts: Facts
) -> None:
    """Check the facts of a write. `spans`: of the rows. Raises `TooLarge`, `WrongLength`."""
    if (largest := max(facts.row_bytes, default=0)) > residents.spec.max_bytes:
        row = rows[facts.row_bytes.index(largest)]
        raise TooLarge(
            f"row {row} has {largest} bytes, more than store.max_bytes={residents.spec.max_bytes}. Raise "
            "store.max_bytes."
        )
    decider = residents.readiness.column_index.get("response_ids")
    if facts.token_lengths is None or decider is None or decider in written:
        return
    for group_id, position, indices in spans:
        group = residents.groups.get(group_id)
        came = facts.token_lengths[position : position + len(indices)]
        if group is None or came == group.response_tokens[indices.start : indices.stop]:
            continue
        for index, length in zip(indices, came, strict=True):
            if group.have[decider] >> index & 1 and length != group.response_tokens[index]:
                raise WrongLength(
                    f"column {facts.token_column!r}, row {group_id * residents.size + index}: {length} entries, but "
                    f"the response has {group.response_tokens[index]} tokens. Every token column has one entry for "
                    "each response token."
                )


def note_facts(
    residents: Residents,
    stage: StageQueue,
    spans: Sequence[Span],
    fresh: dict[int, int],
    written: Sequence[int],
    facts: Facts,
) -> list[int]:
    """Keep the facts of the fresh rows. Returns their positions. `spans`: of all rows that came."""
    kept: list[int] = []
    for group_id, position, indices in spans:
        mask = mask_of(indices)
        new = fresh.get(group_id, 0) & mask
        if not new:
            continue
        group = residents.groups[group_id]
        if new == mask == untouched(group, mask, stage.writes):
            _note_span(residents, stage, group, indices, position, facts)
            kept.extend(range(position, position + len(indices)))
            continue
        there = mask
        for column in written:
            there &= group.have[column]
        for index in bits(new & ~there):
            at = position + index - indices.start
            # Facts are about a column, and are news for a row that does not have it yet.
            news = [_lacks(residents, group, index, name) for name in ("token_versions", "response_ids")]
            _note_span(residents, stage, group, range(index, index + 1), at, facts, *news)
            kept.append(at)
    return kept


def _lacks(residents: Residents, group: Group, index: int, name: str) -> bool:
    column = residents.readiness.column_index.get(name)
    return column is not None and not group.have[column] >> index & 1


def _note_span(
    residents: Residents,
    stage: StageQueue,
    group: Group,
    indices: range,
    position: int,
    facts: Facts,
    versions: bool = True,
    lengths: bool = True,
) -> None:
    """Keep facts of rows side by side, from `position` on. `versions`, `lengths`: which of them are news, if they
    came."""
    end = position + len(indices)
    where = slice(indices.start, indices.stop)
    row_bytes = facts.row_bytes[position:end]
    first = stage.index * residents.size
    of_stage = slice(first + indices.start, first + indices.stop)
    earlier = group.row_bytes[of_stage]
    group.row_bytes[of_stage] = map(operator.add, earlier, row_bytes) if any(earlier) else row_bytes
    residents.credits.bytes += sum(row_bytes)
    if residents.outcomes is not None and facts.rewards is not None:
        for index, reward in zip(indices, facts.rewards[position:end], strict=True):
            residents.outcomes.note(group.id, index, reward)
    if versions and facts.oldest_version is not None:
        group.oldest[where] = facts.oldest_version[position:end]
    if lengths and facts.response_tokens is not None:
        tokens = facts.response_tokens[position:end]
        group.response_tokens[where] = tokens
        residents.counters["response_tokens_generated"] += sum(tokens)
        if facts.context_tokens is not None:
            group.context_tokens[where] = facts.context_tokens[position:end]
