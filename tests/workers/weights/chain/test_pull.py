"""Reasons for which a node asks another upstream, and others for which it does not."""

import pytest

from penstock.workers.weights.chain.plan import MOST_DAMAGED, ChunkTimes, Pull, Timeouts
from penstock.workers.weights.chain.subscription import Feed

TIMEOUTS = Timeouts(heartbeat_s=0.05, factor=3.0, floor_s=0.2, first_s=1.0, cut_off=4.0)
MIB = 2**20


def pull_of(*upstreams: str, num_chunks: int = 4) -> Pull:
    return Pull(range(num_chunks), upstreams or ("a", "b", "x"), MIB, ChunkTimes(TIMEOUTS), TIMEOUTS, now=10.0)


def test_chunks_are_kept_once() -> None:
    pull = pull_of()
    assert pull.arrived(2, MIB, 0.01, 10.1)
    assert not pull.arrived(2, MIB, 0.01, 10.2)
    assert pull.missing == {0, 1, 3}


def test_a_lost_upstream_is_followed_by_the_next_and_at_last_by_the_first_again() -> None:
    pull = pull_of()
    asked = []
    for second in range(4):
        asked.append(pull.upstream)
        pull.lost(10.0 + second)
    assert asked == ["a", "b", "x", "a"]
    assert (pull.turn, pull.reparented) == (4, 4)


def test_all_upstreams_asked_in_vain_are_given_a_moment() -> None:
    pull = pull_of("a", "x")
    pull.lost(11.0)
    assert pull.not_before == 11.0
    pull.lost(11.0)
    assert pull.not_before > 11.0


def test_silence_is_borne_for_three_times_the_median_chunk() -> None:
    pull = pull_of(num_chunks=20)
    assert pull.deadline == 11.0
    for chunk, seconds in enumerate((0.5, 0.5, 9.0)):
        pull.arrived(chunk, MIB, seconds, 20.0)
    assert pull.deadline == pytest.approx(20.0 + 3 * 0.5)


def test_silence_is_borne_no_less_than_the_floor_however_fast_chunks_are() -> None:
    pull = pull_of()
    pull.arrived(0, MIB, 0.001, 20.0)
    assert pull.deadline == pytest.approx(20.2)


def test_a_chunk_of_which_some_comes_is_borne_longer_but_not_for_ever() -> None:
    pull = pull_of()
    pull.arrived(0, MIB, 0.1, 20.0)
    now = 20.0
    while pull.deadline > now:
        now += 0.05
        pull.progressed(now)
    assert now == pytest.approx(20.0 + 4 * 3 * 0.1, abs=0.06)


def test_tiny_chunks_say_nothing_of_the_link() -> None:
    pull = pull_of()
    pull.arrived(0, 100, 0.001, 20.0)
    assert pull.deadline == 21.0


def test_an_upstream_that_waits_for_the_trainer_is_kept() -> None:
    pull = pull_of()
    for tick in range(10_000):
        pull.waiting(0.01, 10.0 + tick * 0.05)
    assert (pull.upstream, pull.turn) == ("a", 0)
    assert pull.source_age_s(10.0 + 9_999 * 0.05) == pytest.approx(0.01)


def test_an_upstream_that_is_cut_off_itself_is_given_up() -> None:
    pull = pull_of()
    now, age = 10.0, 0.0
    while pull.upstream == "a":
        now, age = now + 0.05, age + 0.05
        pull.waiting(age, now)
    assert now - 10.0 == pytest.approx(4 * TIMEOUTS.first_s, abs=0.06)


def test_a_damaged_chunk_is_asked_of_its_upstream_once_more_then_of_another() -> None:
    pull = pull_of()
    for chunk in (0, 1, 3):
        pull.arrived(chunk, MIB, 0.01, 11.0)
    pull.damaged(2, 11.0)
    assert pull.turn == 0
    pull.ended(11.1)
    assert (pull.turn, pull.upstream, pull.missing) == (1, "a", {2})
    pull.damaged(2, 11.2)
    assert (pull.turn, pull.upstream) == (2, "b")


def test_a_chunk_that_is_always_damaged_is_the_end() -> None:
    pull = pull_of()
    for _ in range(MOST_DAMAGED):
        assert pull.failure is None
        pull.damaged(2, 11.0)
    assert "chunk 2 came damaged 8 times" in str(pull.failure)


def test_where_all_are_slow_one_is_heard_out() -> None:
    pull = pull_of()
    waits = []
    for _ in range(4):
        waits.append(pull.deadline - pull.not_before)
        pull.lost(pull.deadline)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    pull.arrived(0, MIB, 5.0, 100.0)
    assert pull.deadline == pytest.approx(115.0)


def test_small_chunks_are_sent_together_and_large_ones_alone() -> None:
    spans = [(0, 100), (100, 200), (200, 200 + MIB), (2 * MIB, 2 * MIB + 50), (3 * MIB, 3 * MIB + 60)]
    log = [0, 1, 2, 3]
    feed = Feed(log, {0, 1, 2, 4}, spans)
    assert [feed.next_parcel() for _ in range(3)] == [[0, 1], [2], []]
    assert not feed.is_over
    log.append(4)
    assert (feed.next_parcel(), feed.is_over) == ([4], True)
