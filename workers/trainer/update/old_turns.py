"""Turns that are too old to be trained become context of those that are not. Pure.

A trajectory may outlast the bound of staleness: its first turns were sampled under versions that are more than
`max_staleness` behind by the time it is trained. With `environment.old_turns=context` those turns are read as context,
like the environment's messages, and the others are trained.
"""

from collections.abc import Collection

import numpy as np

from penstock.store.data.rows import Rows
from penstock.workers.trainer.update.sequences import SPANS


def without_old_turns(rows: Rows, oldest: int, token_columns: Collection[str]) -> Rows:
    """The rows, with turns that have a token of a version before `oldest` as context. `token_columns`: names of columns
    with one value a sampled token; those that the rows have are cut alike."""
    versions = rows.arrays("token_versions")
    if not any(len(one) and one.min() < oldest for one in versions):
        return rows
    names = [name for name in rows.names if name in token_columns]
    cut: dict[str, list[np.ndarray]] = {name: [] for name in (*names, "context_ids", SPANS)}
    arrays = {name: rows.arrays(name) for name in cut}
    for index, of_row in enumerate(versions):
        context, spans, kept = _as_context(
            arrays["context_ids"][index], arrays["response_ids"][index], arrays[SPANS][index], of_row, oldest
        )
        cut["context_ids"].append(context)
        cut[SPANS].append(spans)
        for name in names:
            cut[name].append(arrays[name][index][kept])
    for name, values in cut.items():
        rows = rows.with_column(name, values)
    return rows


def _as_context(
    context: np.ndarray, response: np.ndarray, spans: np.ndarray, versions: np.ndarray, oldest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Context and spans of one row without its old turns, and a bool for each of its sampled tokens: whether it is
    left. What follows the last turn of a segment that is left, and segments of which none is, are not read."""
    contexts, runs, kept = [np.zeros(0, context.dtype)], [], np.zeros(len(response), bool)
    waiting: list[np.ndarray] = []
    number, segment, read, said = -1, None, 0, 0
    for of_segment, num_read, num_said in spans.reshape(-1, 3).tolist():
        if of_segment != segment:
            segment, waiting, is_new = of_segment, [], True
        sampled = slice(said, said + num_said)
        waiting.append(context[read : read + num_read])
        read, said = read + num_read, said + num_said
        if versions[sampled].min() < oldest:
            waiting.append(response[sampled])
            continue
        number, is_new = number + is_new, False
        runs += [number, sum(map(len, waiting)), num_said]
        contexts += waiting
        waiting, kept[sampled] = [], True
    return np.concatenate(contexts), np.asarray(runs, spans.dtype), kept
