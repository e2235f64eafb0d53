"""The sequences of a trajectory, of which one turn is the same as prompt and response."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.algorithms.graph.columns import SEEN_PICTURES, STANDARD_COLUMNS
from penstock.algorithms.losses.policy import policy_loss
from penstock.conf.errors import DataError
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.store.data.schema import encode
from penstock.workers.agents.trajectory import Trajectory, Turn, row_columns, segments_of
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.sequences import oldest_versions, sequences_of, shapes_of, without_old_turns
from tests.amounts import amount
from tests.workers.histories import random_turns, turn

TOKENS = ("response_ids", "behavior_logprobs", "token_versions")
COLUMNS = (*TOKENS, "context_ids", "spans", "turn_tokens")


def rows_of(*histories: list[Turn]) -> Rows:
    columns = row_columns([Trajectory(turns) for turns in histories])
    return Rows.from_lists({name: columns[name] for name in COLUMNS})


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(20)))
def test_a_microbatch_has_every_segment_and_every_sampled_token_once(seed: int) -> None:
    rng = random.Random(seed)
    histories = [random_turns(rng, rng.randrange(1, 7)) for _ in range(5)]
    batch = batching.collate(rows_of(*histories), np.arange(5), ["behavior_logprobs"])
    segments = [segment for turns in histories for segment in segments_of(turns)]
    read = batch.input_ids_SL.tolist()
    assert [ids[: len(segment.tokens)] for ids, segment in zip(read, segments, strict=True)] == [
        segment.tokens for segment in segments
    ]
    runs = [run for segment in segments for run in segment.runs]
    assert batch.targets_N.tolist() == [token for run in runs for token in run.turn.output_ids]
    logprobs_N = batch.columns["behavior_logprobs"][batch.mask_BT]
    assert torch.allclose(logprobs_N, torch.tensor([value for run in runs for value in run.turn.logprobs]))
    width = batch.input_ids_SL.shape[1]
    for place, target in zip(batch.positions_N.tolist(), batch.targets_N.tolist(), strict=True):
        assert read[place // width][place % width + 1] == target


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(10)))
def test_one_turn_is_what_a_prompt_and_its_response_are_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    histories = [random_turns(rng, 1) for _ in range(6)]
    trajectories = rows_of(*histories)
    pairs = Rows.from_lists(
        {
            "prompt_ids": [turns[0].prompt_ids for turns in histories],
            "response_ids": [turns[0].output_ids for turns in histories],
            "behavior_logprobs": [turns[0].logprobs for turns in histories],
        }
    )
    assert [part.tolist() for part in shapes_of(trajectories)] == [part.tolist() for part in shapes_of(pairs)]
    order = np.array([3, 0, 5])
    one = batching.collate(trajectories, order, ["behavior_logprobs"])
    other = batching.collate(pairs, order, ["behavior_logprobs"])
    for name in ("input_ids_SL", "positions_N", "targets_N", "slots_N", "mask_BT", "group_ids_B"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.columns["behavior_logprobs"], other.columns["behavior_logprobs"])


def test_the_shape_of_a_trajectory_is_its_longest_segment_their_number_and_sum() -> None:
    rows = rows_of([turn(0, [1, 2], [3]), turn(1, [9], [8])], [turn(0, [1], [2]), turn(1, [1, 2, 3], [4, 5])])
    longest, counts, num_tokens = shapes_of(rows)
    assert longest.tolist() == [3, 5]
    assert counts.tolist() == [2, 1]
    assert num_tokens.tolist() == [5, 5]


def test_a_segment_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="row 0 has an empty prompt"):
        shapes_of(Rows.from_lists({"context_ids": [[1]], "response_ids": [[2, 3]], "spans": [[0, 1, 1, 1, 0, 1]]}))


def test_sequences_count_in_the_plan() -> None:
    lengths, counts = np.array([10, 10, 10]), np.array([1, 4, 1])
    cuts = [sorted(cut.tolist()) for cut in batching.plan(lengths, 50, counts)]
    assert all(counts[cut].sum() * 10 <= 50 for cut in cuts)
    assert sorted(position for cut in cuts for position in cut) == [0, 1, 2]
    assert len(batching.plan(lengths, 60, counts)) == 1
    groups = [sorted(cut.tolist()) for cut in batching.plan_groups(lengths, np.array([0, 1, 2]), 50, counts)]
    assert all(counts[cut].sum() * 10 <= 50 for cut in groups)


def test_gradients_are_those_of_the_turns_each_read_alone(model_path: str) -> None:
    """A trajectory of two segments, one with two turns: its update is that of its three turns as rows of their own,
    with the same totals."""
    rng = random.Random(0)
    turns = [turn(0, [5, 6, 7], [8, 9]), turn(1, [5, 6, 7, 8, 9, 10], [11]), turn(2, [20, 21], [22, 23, 24])]
    trajectory = rows_of(turns).with_column("advantage", [rng.random()])
    alone = Rows.from_lists(
        {
            "prompt_ids": [turn.prompt_ids for turn in turns],
            "response_ids": [turn.output_ids for turn in turns],
            "behavior_logprobs": [turn.logprobs for turn in turns],
            "advantage": [float(trajectory.values("advantage")[0])] * 3,
        }
    )
    found = []
    for rows in (trajectory, alone):
        trainer = PolicyTrainer(TrainerConfig(), model_path)
        report = trainer.update(rows, policy_loss)
        found.append((report.metrics["actor/grad_norm"], np.concatenate(trainer.logprobs(rows)), report.num_tokens))
        trainer.close()
    (norm, logprobs, tokens), (norm_alone, logprobs_alone, tokens_alone) = found
    assert tokens == tokens_alone == 6
    assert norm == pytest.approx(norm_alone, rel=1e-5)
    assert np.allclose(logprobs, logprobs_alone, atol=1e-5)


def test_no_rows_are_no_sequences() -> None:
    assert sequences_of(rows_of([turn(0, [1], [2])]), np.zeros(0, np.int64)).token_ids == []


def test_a_token_has_keys_of_the_oldest_version_of_its_turn() -> None:
    first = replace(turn(0, [1, 2], [3, 4, 5]), versions=[3, 3, 4])
    second = replace(turn(1, [1, 2, 3, 4, 5, 6], [7, 8]), versions=[4, 5])
    (turns,) = oldest_versions(rows_of([first, second]))
    assert turns.tolist() == [3, 3, 3, 4, 4]
    pairs = Rows.from_lists({"token_versions": [np.array([2, 3, 3]), np.array([4])]})
    assert [of_row.tolist() for of_row in oldest_versions(pairs)] == [[2, 2, 2], [4]]


def test_an_old_turn_is_read_and_a_young_one_trained() -> None:
    rows = rows_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6], version=2)])
    found = without_old_turns(rows, 1, TOKENS)
    assert found.lists("response_ids") == [[5, 6]]
    assert found.lists("context_ids") == [[1, 2, 3, 4]]
    assert found.lists("spans") == [[0, 4, 2]]
    assert found.lists("token_versions") == [[2, 2]]
    assert np.allclose(found.arrays("behavior_logprobs")[0], [-1.01, -1.02])


def test_an_old_turn_has_no_tokens_left_to_be_given_credit() -> None:
    columns = row_columns([Trajectory([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6], version=2)])])
    rows = Rows.from_lists({name: columns[name] for name in (*COLUMNS, "turn_tokens")})
    assert without_old_turns(rows, 1, TOKENS).lists("turn_tokens") == [[0, 2]]


def test_rows_that_are_young_are_left_as_they_are() -> None:
    rows = rows_of([turn(0, [1, 2], [3], version=1)])
    assert without_old_turns(rows, 1, TOKENS) is rows


def test_what_nobody_reads_any_more_goes() -> None:
    """A segment of old turns alone, and the end of one whose last turn is old."""
    turns = [turn(0, [1], [2]), turn(1, [5], [6], version=3), turn(2, [5, 6, 7], [8])]
    found = without_old_turns(rows_of(turns), 3, TOKENS)
    assert found.lists("response_ids") == [[6]]
    assert (found.lists("context_ids"), found.lists("spans")) == ([[5]], [[0, 1, 1]])


def test_records_of_experts_stay_with_the_tokens_that_are_read() -> None:
    """A segment that ends with its young turn, and one of old turns alone. A record says segment and place."""
    turns = [turn(0, [5], [6], version=3), turn(1, [1], [2, 3]), turn(2, [5, 6, 7], [8, 9], version=3),
             turn(3, [5, 6, 7, 8, 9, 4], [4])]  # fmt: skip
    rows = rows_of(turns).with_column("routed_experts", [np.array([0, 1, 2, 3, 4, 5, 10, 11], np.uint8)])
    found = without_old_turns(rows, 3, TOKENS)
    assert found.lists("response_ids") == [[6, 8, 9]]
    assert found.lists("routed_experts") == [[0, 1, 2, 3]]
    batch = batching.collate(found, np.array([0]))
    assert batch.experts_SLW is not None
    assert batch.experts_SLW.tolist() == [[0], [1], [2], [3], [-1]]


def test_pictures_stay_with_the_tokens_that_are_read() -> None:
    """A segment of old turns alone, one that ends with its young turn, and what came after that."""
    turns = [turn(0, [5, 5], [2]), turn(1, [7, 5, 5], [6]), turn(2, [7, 5, 5, 6, 5, 5], [8], version=3),
             turn(3, [7, 5, 5, 6, 5, 5, 8, 5, 5], [9])]  # fmt: skip
    seen = ([0], [1], [1, 4], [1, 4, 7])
    turns = [
        replace(one, pictures=PromptPictures((b"a",) * len(offsets), tuple((offset, 2) for offset in offsets)))
        for one, offsets in zip(turns, seen, strict=True)
    ]
    columns = row_columns([Trajectory(turns)])
    rows = Rows.from_lists({name: columns[name] for name in (*COLUMNS, *SEEN_PICTURES)})
    assert rows.lists("seen_ranges") == [[0, 0, 2, 1, 1, 2, 1, 4, 2, 1, 7, 2]]
    found = without_old_turns(rows, 3, TOKENS)
    assert found.lists("context_ids") == [[7, 5, 5, 6, 5, 5]]
    assert found.lists("seen_ranges") == [[0, 0, 0, 0, 1, 2, 0, 4, 2, 0, 0, 0]]


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(30)))
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


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(30)))
def test_a_row_that_the_store_takes_for_young_has_a_turn_that_is_trained(seed: int) -> None:
    """Weights change within turns: of the newest turn only the end may be young."""
    rng = random.Random(seed)
    histories = []
    for _ in range(20):
        turns = [replace(one, versions=[rng.randrange(3) for _ in one.output_ids]) for one in random_turns(rng, 3)]
        histories.append(turns)
    columns = row_columns([Trajectory(turns) for turns in histories])
    given = {name: columns[name] for name in COLUMNS}
    _, facts = encode(STANDARD_COLUMNS, given, range(len(histories)), by_turn=True)
    found = without_old_turns(Rows.from_lists(given), 1, TOKENS)
    assert facts.oldest_version is not None
    is_young = [oldest >= 1 for oldest in facts.oldest_version]
    assert is_young == [len(spans) > 0 for spans in found.lists("spans")]
    assert {True, False} <= set(is_young)
