"""Turns become segments, and an attempt the columns of its row."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.algorithms.graph.columns import SEEN_PICTURES, STANDARD_COLUMNS, TRAJECTORY_COLUMNS, TURN_STATES
from penstock.store.data.schema import encode
from penstock.workers.agents.trajectory import (
    FAILED,
    REJECTED,
    TRUNCATED,
    AttemptOutcome,
    Trajectory,
    Turn,
    row_columns,
    segments_of,
    spans_of,
)
from penstock.workers.pictures.prompt_pictures import PromptPictures
from tests.amounts import amount
from tests.workers.histories import random_turns, turn


def test_a_row_has_what_was_sampled_in_the_order_of_its_segments() -> None:
    turns = [turn(0, [1], [2, 3]), turn(1, [9], [8], version=4, text="two"), turn(2, [1, 2, 3, 5], [6], text="three")]
    columns = row_columns([Trajectory(turns, reward=1.5, turn_rewards={2: 0.5})])
    assert columns["response_ids"][0].tolist() == [2, 3, 6, 8]
    assert columns["context_ids"][0].tolist() == [1, 5, 9]
    assert columns["spans"][0].tolist() == [0, 1, 2, 0, 1, 1, 1, 1, 1]
    assert columns["token_versions"][0].tolist() == [0, 0, 0, 4]
    assert columns["turn_tokens"][0].tolist() == [2, 1, 1]
    assert columns["turn_rewards"][0].tolist() == [0.0, 0.5, 0.0]
    assert np.allclose(columns["behavior_logprobs"][0], [-0.01, -0.02, -2.01, -1.01])
    assert columns["response_text"] == ["three"]
    assert columns["reward"] == [1.5]


def test_what_a_turn_has_read_is_its_state_and_pictures_are_part_of_it() -> None:
    """Turns 1 and 2 read the same after others; with pictures of their own they differ, and not by earlier ones."""
    first, second, third = turn(0, [1], [2]), turn(1, [1, 2, 5, 7], [3]), turn(2, [1, 2, 5, 7, 3, 5, 7], [4])
    states = row_columns([Trajectory([first, second, third])])["turn_states"][0].tolist()
    assert states[0] != states[1] == states[2]
    for seen, is_same in (((b"a", b"a"), True), ((b"a", b"b"), False)):
        one = replace(second, pictures=PromptPictures(seen[:1], ((3, 1),)))
        two = replace(third, pictures=PromptPictures(seen, ((3, 1), (6, 1))))
        found = row_columns([Trajectory([first, one, two])])["turn_states"][0].tolist()
        assert (found[1] == found[2]) == is_same
        assert found[1] != states[1]


def test_rewards_read_what_was_said_last_and_not_what_was_thought() -> None:
    said = {"role": "assistant", "reasoning_content": "Maybe it is 7", "content": "It is 4."}
    last = replace(turn(0, [1], [2], text="<think>\nMaybe it is 7\n</think>\n\nIt is 4."), message=said)
    assert Trajectory([last]).text == "It is 4."
    assert row_columns([Trajectory([last], said=[said])])["response_text"] == ["It is 4."]
    only_thought = replace(last, message={"role": "assistant", "reasoning_content": "Maybe it is 7", "content": ""})
    assert Trajectory([only_thought]).text == ""


def test_each_token_has_the_temperature_of_its_turn() -> None:
    turns = [turn(0, [1], [2, 3]), turn(1, [9], [8], temperature=0.5), turn(2, [1, 2, 3, 5], [6], temperature=2.0)]
    assert row_columns([Trajectory(turns)])["token_temperatures"][0].tolist() == [1.0, 1.0, 2.0, 0.5]


def test_each_token_has_the_experts_of_the_turn_that_read_it_first() -> None:
    """Records of one byte: the number of the turn, times ten, and the token's place."""
    turns = [turn(0, [1], [2, 3]), turn(1, [9], [8]), turn(2, [1, 2, 3, 5], [6, 7])]
    turns = [
        replace(one, routed_experts=bytes(10 * one.id + at for at in range(len(one.prompt_ids + one.output_ids) - 1)))
        for one in turns
    ]
    # Turn 0 read 1 and 2; turn 2 the token that turn 0 sampled last, what came between, and its own first token.
    assert row_columns([Trajectory(turns)])["routed_experts"][0].tolist() == [0, 1, 22, 23, 24, 10]
    wide = [replace(one, routed_experts=bytes(byte for byte in one.routed_experts for _ in "ab")) for one in turns]
    assert row_columns([Trajectory(wide)])["routed_experts"][0].tolist() == [0, 0, 1, 1, 22, 22, 23, 23, 24, 24, 10, 10]


def seeing(one: Turn, *places: tuple[bytes, int]) -> Turn:
    """The turn with these pictures, of two placeholders each."""
    encoded = tuple(picture for picture, _ in places)
    return replace(one, pictures=PromptPictures(encoded, tuple((offset, 2) for _, offset in places)))


def test_a_row_has_the_pictures_of_each_segment_and_their_places_in_its_tokens() -> None:
    turns = [
        seeing(turn(0, [1, 5, 5], [2]), (b"one", 1)),
        seeing(turn(1, [1, 5, 5, 2, 5, 5, 3], [4]), (b"one", 1), (b"two", 4)),
        turn(2, [9], [8]),
        seeing(turn(3, [7, 7, 5, 5], [6]), (b"one", 2)),
    ]
    columns = row_columns([Trajectory(turns)])
    assert columns["spans"][0].tolist() == [0, 3, 1, 0, 3, 1, 1, 1, 1, 2, 4, 1]
    assert columns["seen_pictures"] == [[b"one", b"two", b"one"]]
    assert columns["seen_ranges"][0].tolist() == [0, 1, 2, 0, 4, 2, 2, 2, 2]


def test_the_same_tokens_with_another_picture_are_another_segment() -> None:
    first, again = turn(0, [1, 5, 5], [2]), turn(1, [1, 5, 5, 2, 3], [4])
    assert len(segments_of([seeing(first, (b"one", 1)), seeing(again, (b"one", 1))])) == 1
    assert len(segments_of([seeing(first, (b"one", 1)), seeing(again, (b"two", 1))])) == 2


def test_a_transcript_names_pictures_by_their_number_among_the_distinct_ones() -> None:
    said = [
        {"role": "user", "content": [{"type": "image", "image": b"two"}, {"type": "text", "text": "?" * 5000}]},
        {"role": "user", "content": [{"type": "image", "image": b"unread"}, {"type": "image", "image": b"one"}]},
    ]
    shown = seeing(turn(0, [5, 5, 5, 5, 5, 5], [2]), (b"one", 0), (b"one", 2), (b"two", 4))
    (transcript,) = row_columns([Trajectory([shown], said=said)])["transcript"]
    one, two = (message["content"] for message in json.loads(transcript))
    assert one[0] == {"type": "image", "picture": 1}
    assert one[1]["text"].endswith("(1,000 more characters)")
    assert two == [{"type": "text", "text": "[picture]"}, {"type": "image", "picture": 0}]


def test_a_limit_is_the_finish_reason() -> None:
    trajectories = [
        Trajectory([turn(0, [1], [2])]),
        Trajectory([turn(0, [1], [2])], AttemptOutcome(TRUNCATED, "turns")),
    ]
    assert row_columns(trajectories)["finish_reason"] == ["stop", "turns"]


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(20)))
def test_the_store_takes_any_history(seed: int) -> None:
    rng = random.Random(seed)
    columns = row_columns([Trajectory(random_turns(rng, 8)) for _ in range(3)])
    known = {name: STANDARD_COLUMNS[name] for name in (*TRAJECTORY_COLUMNS, *SEEN_PICTURES, TURN_STATES, "reward")}
    assert columns.keys() == known.keys()
    batch, facts = encode(known, columns, [0, 1, 2])
    assert facts.response_tokens == [sum(numbers) for numbers in batch.column("turn_tokens").to_pylist()]


def test_each_policy_has_its_own_turns_reward_and_messages() -> None:
    mine, yours = turn(0, [1], [2]), replace(turn(1, [1, 2, 3], [4, 5]), policy="proposer")
    said = [{"role": "user", "content": name, "policy": name} for name in ("solver", "proposer")]
    rewards = {"solver": 1.0, "proposer": -2.0, "judge": 0.0}
    attempt = Trajectory([replace(mine, policy="solver"), yours], said=said, policy="solver", rewards=rewards)
    columns = row_columns([attempt.of_policy("solver"), attempt.of_policy("proposer")])
    assert columns["policy"] == ["solver", "proposer"]
    assert columns["reward"] == [1.0, -2.0]
    assert [ids.tolist() for ids in columns["response_ids"]] == [[2], [4, 5]]
    assert [ids.tolist() for ids in columns["context_ids"]] == [[1], [1, 2, 3]]
    assert [json.loads(text) for text in columns["transcript"]] == [[message] for message in said]
    silent = attempt.of_policy("judge").outcome
    assert (silent.kind, silent.reason) == (REJECTED, "silent")
    failed = replace(attempt, outcome=AttemptOutcome(FAILED, "timeout"))
    assert failed.of_policy("judge").outcome == failed.outcome


def test_a_comparison_rewards_all_policies_or_some() -> None:
    attempt = Trajectory([turn(0, [1], [2])], reward=0.5, policy="solver", rewards={"solver": 0.5, "proposer": 0.25})
    assert attempt.with_reward(2.0).rewards == {"solver": 2.0, "proposer": 2.0}
    assert attempt.with_reward({"solver": 3.0}).reward == 3.0
    assert attempt.with_reward({"solver": 3.0}).rewards == {"solver": 3.0, "proposer": 0.25}
    with pytest.raises(ValueError, match="'propser'; did you mean 'proposer'"):
        attempt.with_reward({"propser": 1.0})


def test_what_failed_is_not_trained() -> None:
    assert [AttemptOutcome(kind).is_trained for kind in (TRUNCATED, REJECTED, FAILED)] == [True, False, False]


def test_a_megabyte_of_a_tool_is_cut_for_people() -> None:
    said = [{"role": "tool", "content": "x" * 1_000_000}]
    (shown,) = json.loads(row_columns([Trajectory([turn(0, [1], [2])], said=said)])["transcript"][0])
    assert len(shown["content"]) < 5_000
    assert shown["content"].endswith("996,000 more characters)")


def test_a_turn_that_reads_on_stays_in_its_segment() -> None:
    (segment,) = segments_of([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 4], [5, 6])])
    assert segment.tokens == [1, 2, 3, 4, 5, 6]
    assert spans_of([segment]) == [0, 2, 1, 0, 1, 2]


def test_a_rewritten_history_starts_a_new_segment() -> None:
    segments = segments_of([turn(0, [1, 2], [3]), turn(1, [1, 9, 3, 4], [5])])
    assert [segment.tokens for segment in segments] == [[1, 2, 3], [1, 9, 3, 4, 5]]
    assert spans_of(segments) == [0, 2, 1, 1, 4, 1]


def test_a_shared_prefix_is_sampled_once_and_is_context_in_another_branch() -> None:
    segments = segments_of([turn(0, [1], [2]), turn(1, [1, 2, 7], [3]), turn(2, [1, 2, 8], [4])])
    assert spans_of(segments) == [0, 1, 1, 0, 1, 1, 1, 3, 1]


def test_the_same_request_twice_is_two_segments() -> None:
    assert spans_of(segments_of([turn(0, [1], [2]), turn(1, [1], [2])])) == [0, 1, 1, 1, 1, 1]


def test_a_longer_match_wins() -> None:
    turns = [turn(0, [1], [2]), turn(1, [5], [6]), turn(2, [1, 2], [3]), turn(3, [1, 2, 3], [4])]
    assert [segment.tokens for segment in segments_of(turns)] == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(50)))
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
