import random

import numpy as np
import pytest

from penstock.store.data.rows import Rows
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.sequences import without_old_turns
from penstock.workers.trajectory import Trajectory, Turn, row_columns, segments_of
from tests.workers.histories import random_turns, turn

TOKENS = ("response_ids", "behavior_logprobs", "token_versions")
COLUMNS = (*TOKENS, "context_ids", "spans", "turn_tokens")


def rows_of(*histories: list[Turn]) -> Rows:
    columns = row_columns([Trajectory(turns) for turns in histories])
    return Rows.from_lists({name: columns[name] for name in COLUMNS})


def test_an_old_turn_is_read_and_a_young_one_trained() -> None:
    rows = rows_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6], version=2)])
    found = without_old_turns(rows, 1, TOKENS)
    assert found.lists("response_ids") == [[5, 6]]
    assert found.lists("context_ids") == [[1, 2, 3, 4]]
    assert found.lists("spans") == [[0, 4, 2]]
    assert found.lists("token_versions") == [[2, 2]]
    assert np.allclose(found.arrays("behavior_logprobs")[0], [-1.01, -1.02])


def test_rows_that_are_young_are_left_as_they_are() -> None:
    rows = rows_of([turn(0, [1, 2], [3], version=1)])
    assert without_old_turns(rows, 1, TOKENS) is rows


def test_what_nobody_reads_any_more_goes() -> None:
    """A segment of old turns alone, and the end of one whose last turn is old."""
    turns = [turn(0, [1], [2]), turn(1, [5], [6], version=3), turn(2, [5, 6, 7], [8])]
    found = without_old_turns(rows_of(turns), 3, TOKENS)
    assert found.lists("response_ids") == [[6]]
    assert (found.lists("context_ids"), found.lists("spans")) == ([[5]], [[0, 1, 1]])


@pytest.mark.parametrize("seed", range(30))
def test_the_model_reads_the_same_before_every_token_that_is_left(seed: int) -> None:
    rng = random.Random(seed)
    turns = [turn(one.id, list(one.prompt_ids), list(one.output_ids), rng.randrange(3)) for one in random_turns(rng, 8)]
    young = [one for one in turns if one.versions[0] >= 1]
    if not young:
        return
    batch = batching.collate(without_old_turns(rows_of(turns), 1, TOKENS), np.array([0]), [])
    width = batch.input_ids_SL.shape[1]
    read = batch.input_ids_SL.flatten().tolist()
    runs = [run.turn for segment in segments_of(turns) for run in segment.runs if run.turn in young]
    expected = [
        ([*one.prompt_ids, *one.output_ids[:place]], token)
        for one in runs
        for place, token in enumerate(one.output_ids)
    ]
    found = [
        (read[place - place % width : place + 1], target)
        for place, target in zip(batch.positions_N.tolist(), batch.targets_N.tolist(), strict=True)
    ]
    assert found == expected
