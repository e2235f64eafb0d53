"""A member that is lost is restarted while that helps; then the run returns to its last checkpoint."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.faults import LONGEST_PAUSE_S, FaultsConfig
from penstock.orchestrator.recovery.decisions import MemberFaults, Restart, Return

CONFIG = FaultsConfig(max_restarts=3, window_s=600.0, pause_s=1.0)


def test_a_member_is_lost_and_serves_again() -> None:
    member = MemberFaults(CONFIG)
    assert not member.is_lost
    assert member.lost(now=5.0, step=1) == Restart(after_s=0.0)
    assert member.is_lost
    member.caught_up()
    assert not member.is_lost
    assert member.lost_at == 5.0


def test_the_first_restart_is_at_once_and_later_ones_after_doubling_pauses() -> None:
    member = MemberFaults(FaultsConfig(max_restarts=9, window_s=600.0, pause_s=4.0))
    pauses = []
    for step in range(8):
        decision = member.lost(now=10.0 * step, step=step)
        assert isinstance(decision, Restart)
        pauses.append(decision.after_s)
        member.caught_up()
    assert pauses == [0.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_member_that_was_not_lost_for_a_window_begins_anew() -> None:
    member = MemberFaults(CONFIG)
    for step, now in enumerate([0.0, 1.0, 602.0]):
        decision = member.lost(now, step)
        member.caught_up()
    assert decision == Restart(0.0)


def test_the_loss_after_the_last_restart_of_the_window_is_a_return() -> None:
    member = MemberFaults(CONFIG)
    for step in range(3):
        assert isinstance(member.lost(float(step), step), Restart)
        member.caught_up()
    assert member.lost(599.0, 3) == Return("lost after faults.max_restarts=3 restarts in 600 s")
    member.returned()
    assert isinstance(member.lost(600.0, 4), Restart)  # the one at 0 s counts no longer


def test_without_restarts_the_first_loss_is_a_return() -> None:
    assert isinstance(MemberFaults(FaultsConfig(max_restarts=0)).lost(0.0, 1), Return)


def test_a_step_lost_again_after_a_restart_is_a_return_however_long_after() -> None:
    member = MemberFaults(CONFIG)
    member.lost(0.0, 7)
    member.caught_up()
    assert member.lost(3600.0, 7) == Return("lost again at step 7")


def test_after_a_return_the_step_is_made_anew_and_may_be_lost_once_more() -> None:
    member = MemberFaults(CONFIG)
    member.lost(0.0, 7)
    member.caught_up()
    member.lost(1.0, 7)
    member.returned()
    assert isinstance(member.lost(2.0, 7), Restart)


def test_a_restart_that_fails_twice_is_a_return() -> None:
    member = MemberFaults(CONFIG)
    member.lost(0.0, 1)
    decisions = []
    for now in (1.0, 2.0):
        decisions.append(member.failed(now, 1))
        assert member.is_lost
    assert decisions == [Restart(1.0), Return("not brought back by 2 restarts")]


def test_a_member_that_is_back_has_two_tries_again() -> None:
    member = MemberFaults(FaultsConfig(max_restarts=9))
    for step in range(3):
        assert isinstance(member.lost(float(step), step), Restart)
        assert isinstance(member.failed(float(step), step), Restart)
        member.caught_up()


def test_events_out_of_order_are_bugs_and_say_so() -> None:
    member = MemberFaults(CONFIG)
    with pytest.raises(AssertionError, match="the member is not lost"):
        member.caught_up()
    with pytest.raises(AssertionError, match="the member is not lost"):
        member.failed(0.0, 1)
    member.lost(0.0, 1)
    with pytest.raises(AssertionError, match="the member is lost already"):
        member.lost(0.0, 1)


# Random histories: (seconds since the last event, steps made since, whether the restart before it came to serve)
HISTORIES = st.lists(st.tuples(st.floats(0, 400), st.integers(0, 3), st.booleans()), min_size=1, max_size=40)
CONFIGS = st.builds(
    FaultsConfig,
    max_restarts=st.integers(0, 5),
    window_s=st.floats(1, 1000),
    pause_s=st.floats(0, LONGEST_PAUSE_S),
)


def played(config: FaultsConfig, history: list[tuple[float, int, bool]]) -> list[tuple[float, int, object, bool]]:
    """Time, step and decision of each loss or failed restart, and whether it was the latter. Returns are made."""
    member, now, step, events = MemberFaults(config), 0.0, 0, []
    for seconds, steps, serves in history:
        now, step = now + seconds, step + steps
        if member.is_lost and not serves:
            events.append((now, step, member.failed(now, step), True))
        else:
            if member.is_lost:
                member.caught_up()
            events.append((now, step, member.lost(now, step), False))
        if isinstance(events[-1][2], Return):
            member.returned()
    return events


@given(CONFIGS, HISTORIES)
def test_no_window_has_more_restarts_than_allowed(config: FaultsConfig, history: list[tuple[float, int, bool]]) -> None:
    times = [now for now, _, decision, _ in played(config, history) if isinstance(decision, Restart)]
    for start in times:
        assert sum(start <= time < start + config.window_s for time in times) <= config.max_restarts


@given(CONFIGS, HISTORIES)
def test_a_return_follows_two_failures_of_a_restart(
    config: FaultsConfig, history: list[tuple[float, int, bool]]
) -> None:
    for (*_, first_failed), (_, _, decision, second_failed) in pairwise(played(config, history)):
        if first_failed and second_failed:
            assert isinstance(decision, Return)


@given(CONFIGS, HISTORIES)
def test_pauses_do_not_shrink_while_failures_go_on(
    config: FaultsConfig, history: list[tuple[float, int, bool]]
) -> None:
    pause, last = 0.0, float("-inf")
    for now, _, decision, _ in played(config, history):
        if now - last >= config.window_s:
            pause = 0.0
        if isinstance(decision, Restart):
            assert pause <= decision.after_s <= LONGEST_PAUSE_S
            pause = decision.after_s
        last = now


@given(CONFIGS, HISTORIES)
def test_no_step_is_lost_twice_by_a_member_without_a_return(
    config: FaultsConfig, history: list[tuple[float, int, bool]]
) -> None:
    restarted_for: set[int] = set()
    for _, step, decision, failed in played(config, history):
        if step in restarted_for and not failed:
            assert isinstance(decision, Return)
        restarted_for = {step} if isinstance(decision, Restart) else set()


@given(CONFIGS, HISTORIES, st.floats(-1e6, 1e6))
def test_it_does_not_matter_when_time_began(
    config: FaultsConfig, history: list[tuple[float, int, bool]], start: float
) -> None:
    """On whole seconds, which floats add up exactly."""
    whole = [(float(round(seconds)), *others) for seconds, *others in history]
    shifted = [(whole[0][0] + round(start), *whole[0][1:]), *whole[1:]]
    assert [event[2] for event in played(config, whole)] == [event[2] for event in played(config, shifted)]
