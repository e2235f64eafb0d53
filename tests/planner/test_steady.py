"""The closed form by hand, with durations that are easy to add up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.planner.durations import SyncSeconds
from penstock.planner.lengths import POINTS, Lengths, Turns
from penstock.planner.steady import EngineGroup, Workload, estimate


@dataclass(frozen=True)
class Constant:
    """Durations that depend on little."""

    each: float = 0.01
    """Seconds of a decode step for each sequence, beside the 0.1 of the step."""
    a_row: float = 0.5
    turn: float = 0.0
    sealed_s: float = 1.5

    def prefill_s(self, tokens: int) -> float:
        return 0.0

    def decode_s(self, num_sequences: float, context: float) -> float:
        return 0.1 + self.each * num_sequences

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return self.a_row * max(map(len, lengths))

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return 2.0

    def sync(self) -> SyncSeconds:
        return SyncSeconds(self.sealed_s, 0.5, 0.25)

    def turn_s(self) -> float:
        return self.turn


TEN = Lengths((10,) * POINTS, prompt=5)
WORK = Workload(groups=4, group_size=2, lengths=TEN, num_shares=2)


def test_a_synchronous_step_is_the_sum() -> None:
    """Two engines decode four sequences each in ten steps of 0.14 s; two ranks train four rows each in 2 s."""
    found = estimate([EngineGroup(2, Constant(), 256)], Constant(), replace(WORK, stages=(("reward", 1),)))
    assert found.rollout_s == pytest.approx(1.4)
    assert found.step_s == pytest.approx(1.4 + 2.0 + 2.0 + 1.5 + 0.5)
    assert found.limit == "turns"


def test_turns_on_the_same_devices_are_counted_twice() -> None:
    apart = estimate([EngineGroup(2, Constant(), 256)], Constant(), WORK)
    both = estimate([EngineGroup(2, Constant(), 256)], Constant(turn=3.0), replace(WORK, is_colocated=True))
    assert both.step_s == pytest.approx(apart.step_s + 6.0)


def test_one_step_off_the_longest_decides() -> None:
    """Each engine has room for half of a batch: 8 rows in 1.4 s, and a pause. A batch is on its way for 1.4 + update +
    2 s, and two are."""
    off = replace(WORK, max_staleness=1)
    slow = estimate([EngineGroup(2, Constant(), 256)], Constant(a_row=5.0), off)
    assert (slow.limit, slow.step_s) == ("training", pytest.approx(20.25))
    fast = estimate([EngineGroup(2, Constant(), 4)], Constant(a_row=0.0, sealed_s=0.25), off)
    assert (fast.limit, fast.step_s) == ("generation", pytest.approx(1.4 + 0.5))
    assert estimate([EngineGroup(2, Constant(), 4)], Constant(a_row=0.25), off).limit == "staleness"


def test_engines_that_wait_for_ranks_decode_batch_by_batch() -> None:
    """An update takes 20 s. Engines would make 8 rows a step in 0.9 s if they had two batches at a time, all the time.
    They get one with each version, which they make in 1.4 s."""
    found = estimate([EngineGroup(2, Constant(), 256)], Constant(a_row=5.0), replace(WORK, max_staleness=1))
    assert found.rollout_s == pytest.approx(0.5 + 10 * 0.18 / 2)
    assert found.busy_s == pytest.approx(0.5 + 10 * 0.14)


class ByTokens(Constant):
    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return float(max(map(sum, lengths)))


def test_ranks_wait_for_the_longest_row_of_each_mini_batch() -> None:
    """Of 8 rows of 1 to 100 tokens each of two shares has four, of 13, 38, 63 and 88 in the mean. In four mini-batches
    of two rows one rank has the longer one, of 76."""
    work, engines = replace(WORK, lengths=Lengths(tuple(range(1, 101)), prompt=0)), [EngineGroup(2, Constant(), 256)]
    assert estimate(engines, ByTokens(), work).update_s == 202
    assert estimate(engines, ByTokens(), replace(work, num_minibatches=4)).update_s == 4 * 76


def test_what_no_engine_has_a_place_for_waits() -> None:
    """One engine with two places makes eight rows of ten tokens: forty steps of 0.12 s."""
    found = estimate([EngineGroup(1, Constant(), 2)], Constant(), WORK)
    assert found.rollout_s == pytest.approx(4.8, rel=0.1)


def test_faster_engines_take_more_of_a_batch() -> None:
    slow, fast = EngineGroup(1, Constant(each=0.05), 256), EngineGroup(1, Constant(each=0.01), 256)
    mixed = estimate([slow, fast], Constant(), WORK).rollout_s
    assert estimate([replace(fast, count=2)], Constant(), WORK).rollout_s < mixed
    assert mixed < estimate([replace(slow, count=2)], Constant(), WORK).rollout_s


def test_a_version_after_the_other_may_decide() -> None:
    """One takes 1.5 s until it is sealed and 0.5 s until it is loaded, whatever lies between two updates."""
    off = replace(WORK, max_staleness=4)
    found = estimate([EngineGroup(8, Constant(each=0.0), 256)], Constant(a_row=0.1), off)
    assert (found.limit, found.step_s) == ("weights", pytest.approx(2.0))


def test_places_are_kept_until_the_longest_of_a_group_has_ended() -> None:
    """Of two samples one has 30 tokens, in three pairs of four: the longest has 25 in the mean, a sample 20. Of eight
    places 6.4 decode, which are as many rows in 20 steps."""
    spread = Lengths((10,) * (POINTS // 2) + (30,) * (POINTS // 2), prompt=5)
    many = Workload(64, 2, spread, 2, max_staleness=8)
    found = estimate([EngineGroup(1, Constant(), 8)], Constant(a_row=0.0), many)
    assert found.rollout_s == pytest.approx(128 / 6.4 * 20 * (0.1 + 0.064) + 0.5, rel=0.01)


@dataclass(frozen=True)
class PerRow(Constant):
    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return {"reward": 0.3, "reference": 0.2}[stage] * num_rows


def test_each_stage_has_its_own_actors() -> None:
    """Groups that end together wait for each other's rewards: 8 rows of 0.3 s by 3 actors, of whom one has three, and
    8 of 0.2 s by two ranks."""
    many = replace(WORK, stages=(("reference", 2), ("reward", 3)))
    assert estimate([EngineGroup(2, Constant(), 256)], PerRow(), many).others_s == pytest.approx(0.9 + 0.8)
    one = estimate([EngineGroup(2, Constant(), 256)], PerRow(a_row=0.0), replace(WORK, stages=(("reward", 1),)))
    assert one.others_s == pytest.approx(2.4)
    off = replace(WORK, stages=(("reward", 1),), max_staleness=3)
    assert estimate([EngineGroup(2, Constant(), 256)], PerRow(a_row=0.0), off).limit == "stages"


def test_rewards_are_given_while_longer_groups_go_on() -> None:
    """Three of four groups end after a tenth of the longest, in which their rewards are given: only its own wait."""
    spread = Lengths((10,) * 192 + (100,) * 64, prompt=5)
    work = Workload(4, 1, spread, 1, stages=(("reward", 1),))
    assert estimate([EngineGroup(1, Constant(), 256)], PerRow(), work).others_s == pytest.approx(0.3)


class Reading(ByTokens):
    def prefill_s(self, tokens: int) -> float:
        return tokens / 1000


AGENTS = replace(WORK, lengths=replace(TEN, turns=Turns(3, added=4, wait_s=2.0)))
"""Ten tokens in three turns, and before the second and the third 4 tokens and 2 s."""


def test_attempts_wait_and_read_between_turns() -> None:
    """Each of two engines reads 4 sequences' added tokens and half of a prompt each, decodes ten steps of 0.1 s, and
    waits for 4 s. A share trains four rows of 5 + 10 + 8 tokens."""
    found = estimate([EngineGroup(2, Reading(each=0.0), 256)], Reading(), AGENTS)
    assert found.rollout_s == pytest.approx(4 * (0.008 + 0.0025) + 1.0 + 4.0)
    assert found.update_s == pytest.approx(4 * 23)


def test_attempts_keep_their_places_while_they_wait() -> None:
    """Of four places each makes a row in 1 + 4 s: eight rows in 10 s, where responses of one turn take 2 s."""
    engines, off = [EngineGroup(1, Constant(each=0.0), 4)], replace(AGENTS, max_staleness=8)
    assert estimate(engines, Constant(a_row=0.0), off).rollout_s == pytest.approx(10 + 0.5)
    alone = replace(off, lengths=TEN)
    assert estimate(engines, Constant(a_row=0.0), alone).rollout_s == pytest.approx(2 + 0.5)


def test_sequences_between_turns_make_the_others_decode_faster() -> None:
    """Of 40 under way those decode that are not between turns: with d of them a step takes 0.1 + 0.01 d, and d is 40
    times the share of ten steps of them and 4 s."""
    work = replace(AGENTS, groups=20, max_staleness=8)
    found = estimate([EngineGroup(1, Constant(), 40)], Constant(a_row=0.0), work)
    seconds = found.rollout_s - 0.5  # of 40 rows, which are all under way
    share = (seconds - 4) / seconds
    assert seconds - 4 == pytest.approx(10 * (0.1 + 0.01 * 40 * share), rel=0.01)


@given(waits=st.tuples(st.floats(0, 50), st.floats(0, 50)), staleness=st.integers(0, 3), slots=st.integers(1, 64))
def test_longer_waits_between_turns_never_make_a_step_faster(
    waits: tuple[float, float], staleness: int, slots: int
) -> None:
    first, last = (
        estimate(
            [EngineGroup(2, Reading(), slots)], Reading(a_row=0.1),
            replace(AGENTS, lengths=replace(TEN, turns=Turns(3, 4, wait_s)), max_staleness=staleness),
        ).step_s
        for wait_s in sorted(waits)
    )  # fmt: skip
    assert first <= last * 1.001


@given(
    count=st.integers(1, 8), groups=st.integers(1, 16), size=st.integers(1, 8), staleness=st.integers(0, 3),
    mean=st.integers(2, 300),
)  # fmt: skip
@example(count=6, groups=10, size=1, staleness=0, mean=49)  # less than two rows an engine
def test_more_engines_or_staleness_never_make_a_step_slower(
    count: int, groups: int, size: int, staleness: int, mean: int
) -> None:
    work = Workload(groups, size, Lengths.lognormal(mean, 400, 0.7), 2, staleness)
    before = estimate([EngineGroup(count, Constant(), 512)], Constant(), work).step_s
    assert estimate([EngineGroup(count + 1, Constant(), 512)], Constant(), work).step_s <= before * 1.02
    if staleness:
        after = estimate([EngineGroup(count, Constant(), 512)], Constant(), replace(work, max_staleness=staleness + 1))
        assert after.step_s <= before * 1.02
