"""Where pictures lie among a micro-batch's tokens: places, positions, and what is computed once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.update.picture_places import (
    Picture,
    PlacedPicture,
    num_tokens,
    pictures_of,
    place,
    rope_positions,
)

MERGE = 2
BLANK = Picture("", np.zeros((4, 3), np.float32), (1, 2, 2))


def picture(key: str, height: int, width: int) -> Picture:
    return Picture(key, np.full((height * width, 3), ord(key), np.float32), (1, height, width))


def test_the_same_picture_is_there_once_and_its_features_go_to_all_its_places() -> None:
    """Two sequences of 6 and 9 tokens in rows of 9: `a` has 2 features and `b` 4. The first has `a` at 1, the second
    `a` at 0 and `b` at 4."""
    a, b = picture("a", 2, 4), picture("b", 4, 4)
    placed = [[PlacedPicture(a, 1)], [PlacedPicture(a, 0), PlacedPicture(b, 4)]]
    found = place(placed, np.array([6, 9]), np.array([0, 9]), (2, 9), MERGE, BLANK)
    assert found.grids_K3.tolist() == [[1, 2, 4], [1, 4, 4]]
    assert found.pixels_PC[:, 0].tolist() == [ord("a")] * 8 + [ord("b")] * 16
    assert found.places_F.tolist() == [1, 2, 9, 10, 13, 14, 15, 16]
    assert found.sources_F.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert found.position_ids_3SL[:, 0, :6].tolist() == [[0, 1, 1, 3, 4, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_sequences_one_after_the_other_have_the_positions_that_they_have_alone() -> None:
    placed = [[PlacedPicture(picture("a", 2, 4), 1)], [], [PlacedPicture(picture("b", 4, 4), 0)]]
    lengths = np.array([5, 3, 6])
    packed = place(placed, lengths, np.array([0, 5, 8]), (1, 14), MERGE, BLANK).position_ids_3SL[:, 0]
    alone = [rope_positions(one, length, MERGE) for one, length in zip(placed, lengths.tolist(), strict=True)]
    assert packed.tolist() == np.concatenate(alone, axis=1).tolist()


def test_without_pictures_there_is_a_blank_one_that_goes_nowhere() -> None:
    found = place([[], []], np.array([2, 3]), np.array([0, 3]), (2, 3), MERGE, BLANK)
    assert len(found.places_F) == 0
    assert torch.equal(found.pixels_PC, torch.zeros(4, 3))
    assert found.position_ids_3SL[:, 1].tolist() == [[0, 1, 2]] * 3


def test_a_rank_that_has_some_columns_reads_the_features_that_go_there() -> None:
    """Rows of 9 in two halves of 5: places 1, 2 of the first row and 0, 1, 4 of the second are in the first half."""
    a, b = picture("a", 2, 4), picture("b", 4, 4)
    placed = [[PlacedPicture(a, 1)], [PlacedPicture(a, 0), PlacedPicture(b, 4)]]
    whole = place(placed, np.array([6, 9]), np.array([0, 9]), (2, 9), MERGE, BLANK)
    first, second = (whole.columns(start, 5, 9) for start in (0, 5))
    assert first.places_F.tolist() == [1, 2, 5, 6, 9]
    assert first.sources_F.tolist() == [0, 1, 0, 1, 2]
    assert second.places_F.tolist() == [5, 6, 7]
    assert second.sources_F.tolist() == [3, 4, 5]


def test_features_that_are_known_are_there_in_the_place_of_pixels() -> None:
    a, b = (
        replace(picture(key, 2, 4), pixels_PC=np.zeros((0, 3), np.float32), features_UE=torch.full((2, 5), number))
        for key, number in (("a", 1.0), ("b", 2.0))
    )
    found = place([[PlacedPicture(b, 0), PlacedPicture(a, 3)]], np.array([6]), np.array([0]), (1, 6), MERGE, BLANK)
    assert found.features_UE is not None
    assert found.features_UE[:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert len(found.pixels_PC) == 0
    assert place([[]], np.array([6]), np.array([0]), (1, 6), MERGE, BLANK).features_UE is None


@pytest.mark.parametrize("offsets", [(0, 1), (0, 9), (3, 0)], ids=["one in another", "beyond the end", "out of order"])
def test_pictures_that_do_not_fit_are_refused(offsets: tuple[int, int]) -> None:
    placed = [PlacedPicture(picture("a", 2, 4), offset) for offset in offsets]
    with pytest.raises(DataError, match="a picture has tokens"):
        rope_positions(placed, 10, MERGE)


class Keyed:
    """A processor of pictures that are a key alone: `a` has 2 features and `b` 4."""

    merge, blank, token_ids = MERGE, BLANK, ()

    def read(self, encoded: Any) -> Picture:
        key = bytes(encoded).decode()
        return picture(key, 2 if key == "a" else 4, 4)


def trajectories() -> Rows:
    """Two rows: a segment with `a` and, in a later turn, `b`, and one with a picture that is read no more; and one with
    `b`."""
    return Rows.from_lists({
        "response_ids": [[1, 1, 1], [1]],
        "spans": [[0, 3, 1, 0, 5, 1, 1, 1, 1], [0, 5, 1]],
        "seen_pictures": [[b"a", b"b", b"a"], [b"b"]],
        "seen_ranges": [[0, 1, 2, 0, 5, 4, 0, 0, 0], [0, 1, 4]],
    })  # fmt: skip


def test_pictures_of_turns_are_placed_in_their_segments() -> None:
    """Sequences of 10, 2 and 6 tokens; then the rows the other way round, packed."""
    found = pictures_of(trajectories(), np.array([0, 1]), np.array([10, 2, 6]), np.arange(3) * 10, (3, 10), Keyed())
    assert found.places_F.tolist() == [1, 2, 5, 6, 7, 8, 21, 22, 23, 24]
    assert found.sources_F.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert found.position_ids_3SL[1, 0].tolist() == [0, 1, 1, 3, 4, 5, 5, 6, 6, 7]
    packed = pictures_of(trajectories(), np.array([1, 0]), np.array([6, 10, 2]), np.array([0, 6, 16]), (1, 18), Keyed())
    assert packed.places_F.tolist() == [1, 2, 3, 4, 7, 8, 11, 12, 13, 14]


def test_a_picture_of_a_turn_with_another_number_of_features_is_refused() -> None:
    rows = trajectories().with_column("seen_ranges", [[0, 1, 2, 0, 5, 3, 0, 0, 0], [0, 1, 4]])
    with pytest.raises(DataError, match="row 0: a picture has 3 placeholders in its prompt, and 4 features here"):
        pictures_of(rows, np.array([0]), np.array([10, 2]), np.array([0, 10]), (2, 10), Keyed())


@given(
    parts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    tail=st.integers(0, 5),
)
def test_text_goes_on_after_the_longer_side_of_each_picture(parts: list[tuple[int, int, int]], tail: int) -> None:
    """Whatever comes before it: a token of text is one further than the largest position so far."""
    placed, length = list[PlacedPicture](), 0
    for text, height, width in parts:
        placed.append(PlacedPicture(picture("a", 2 * height, 2 * width), length + text))
        length += text + height * width
    positions, is_picture = rope_positions(placed, length + tail, MERGE), np.zeros(length + tail, bool)
    for one in placed:
        is_picture[one.offset : one.offset + num_tokens(one.picture.grid, MERGE)] = True
    for index in np.flatnonzero(~is_picture).tolist():
        assert set(positions[:, index].tolist()) == {positions[:, :index].max(initial=-1) + 1}
