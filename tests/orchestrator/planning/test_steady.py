"""The closed form by hand, with durations that are easy to add up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.orchestrator.planning.durations import Sync
from penstock.orchestrator.planning.lengths import POINTS, Lengths
from penstock.orchestrator.planning.steady import Engines, Workload, estimate


@dataclass(frozen=True)
class Constant:
    """Durations that depend on little."""

    each: float = 0.01
    """Seconds of a decode step for each sequence, beside the 0.1 of the step."""
    a_row: float = 0.5
    turn: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        return 0.0

    def decode_s(self, num_sequences: float, context: float) -> float:
        return 0.1 + self.each * num_sequences

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return self.a_row * max(map(len, lengths))

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return 2.0

    def sync(self) -> Sync:
        return Sync(1.5, 0.5, 0.25)

    def turn_s(self) -> float:
        return self.turn


TEN = Lengths((10,) * POINTS, prompt=5)
WORK = Workload(groups=4, group_size=2, lengths=TEN, num_shares=2)


def test_a_synchronous_step_is_the_sum() -> None:
    """Two engines decode four sequences each in ten steps of 0.14 s; two ranks train four rows each in 2 s."""
    found = estimate([Engines(2, Constant(), 256)], Constant(), replace(WORK, stages=("reward",)))
    assert found.rollout_s == pytest.approx(1.4)
    assert found.step_s == pytest.approx(1.4 + 2.0 + 2.0 + 1.5 + 0.5)
    assert found.limit == "turns"


def test_turns_on_the_same_devices_are_counted_twice() -> None:
    apart = estimate([Engines(2, Constant(), 256)], Constant(), WORK)
    both = estimate([Engines(2, Constant(), 256)], Constant(turn=3.0), replace(WORK, is_colocated=True))
    assert both.step_s == pytest.approx(apart.step_s + 6.0)


def test_one_step_off_the_longest_decides() -> None:
    """Each engine has four sequences of the one batch that is under way: 8 rows in 1.4 s, and a pause. A batch is on
    its way for 1.4 + update + 2 s, and two are."""
    off = replace(WORK, max_staleness=1)
    slow = estimate([Engines(2, Constant(), 256)], Constant(a_row=5.0), off)
    assert (slow.limit, slow.step_s) == ("training", pytest.approx(20.25))
    fast = estimate([Engines(2, Constant(), 256)], Constant(a_row=0.0), off)
    assert (fast.limit, fast.step_s) == ("generation", pytest.approx(1.4 + 0.5))
    assert estimate([Engines(2, Constant(), 256)], Constant(a_row=0.25), off).limit == "staleness"


def test_what_no_engine_has_a_place_for_waits() -> None:
    """One engine with two places makes eight rows of ten tokens: forty steps of 0.12 s."""
    found = estimate([Engines(1, Constant(), 2)], Constant(), WORK)
    assert found.rollout_s == pytest.approx(4.8, rel=0.1)


def test_faster_engines_take_more_of_a_batch() -> None:
    slow, fast = Engines(1, Constant(each=0.05), 256), Engines(1, Constant(each=0.01), 256)
    mixed = estimate([slow, fast], Constant(), WORK).rollout_s
    assert estimate([replace(fast, count=2)], Constant(), WORK).rollout_s < mixed
    assert mixed < estimate([replace(slow, count=2)], Constant(), WORK).rollout_s


@given(
    count=st.integers(1, 8), groups=st.integers(1, 16), size=st.integers(1, 8), staleness=st.integers(0, 3),
    mean=st.integers(2, 300),
)  # fmt: skip
@example(count=6, groups=10, size=1, staleness=0, mean=49)  # less than two rows an engine
def test_more_engines_or_staleness_never_make_a_step_slower(
    count: int, groups: int, size: int, staleness: int, mean: int
) -> None:
    work = Workload(groups, size, Lengths.lognormal(mean, 400, 0.7), 2, staleness)
    before = estimate([Engines(count, Constant(), 512)], Constant(), work).step_s
    assert estimate([Engines(count + 1, Constant(), 512)], Constant(), work).step_s <= before * 1.02
    if staleness:
        after = estimate([Engines(count, Constant(), 512)], Constant(), replace(work, max_staleness=staleness + 1))
        assert after.step_s <= before * 1.02
