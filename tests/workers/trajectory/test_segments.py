import random

import pytest

from penstock.workers.trajectory.segments import segments_of, spans_of
from tests.workers.trajectory.histories import random_turns, turn


def test_a_turn_that_reads_on_stays_in_its_segment() -> None:
    (segment,) = segments_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6])])
    assert segment.tokens == [1, 2, 3, 4, 5, 6]
    assert spans_of([segment]) == [0, 2, 1, 0, 1, 2]


def test_a_rewritten_history_starts_a_new_segment() -> None:
    segments = segments_of([turn(0, [1, 2], [3]), turn(1, [1, 9, 3, 4], [5])])
    assert [segment.tokens for segment in segments] == [[1, 2, 3], [1, 9, 3, 4, 5]]
    assert spans_of(segments) == [0, 2, 1, 1, 4, 1]


def test_a_shared_prefix_is_sampled_once_and_context_where_another_branch_begins_with_it() -> None:
    segments = segments_of([turn(0, [1], [2]), turn(1, [1, 2, 7], [3]), turn(2, [1, 2, 8], [4])])
    assert spans_of(segments) == [0, 1, 1, 0, 1, 1, 1, 3, 1]


def test_the_same_request_twice_is_two_segments() -> None:
    assert spans_of(segments_of([turn(0, [1], [2]), turn(1, [1], [2])])) == [0, 1, 1, 1, 1, 1]


def test_a_longer_match_wins() -> None:
    turns = [turn(0, [1], [2]), turn(1, [5], [6]), turn(2, [1, 2], [3]), turn(3, [1, 2, 3], [4])]
    assert [segment.tokens for segment in segments_of(turns)] == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize("seed", range(50))
def test_every_turn_is_in_one_segment_and_reads_its_prompt_there(seed: int) -> None:
    turns = random_turns(random.Random(seed), 12)
    segments = segments_of(turns)
    found = sorted(run.turn.id for segment in segments for run in segment.runs)
    assert found == list(range(len(turns)))
    for segment in segments:
        read: list[int] = []
        for run in segment.runs:
            read += run.context
            assert read == list(run.turn.prompt_ids)
            read += run.turn.output_ids
        assert read == segment.tokens
