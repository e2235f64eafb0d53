"""One process drives a run at a time, and nobody else is heard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import TakenOver
from penstock.orchestrator.cluster.owners import Tenure

LEASE_S = 60.0


def test_a_process_heard_of_within_the_lease_keeps_it_and_silence_ends_it() -> None:
    tenure = Tenure(LEASE_S)
    epoch = tenure.take(0.0)
    for now in (59.0, 118.0, 170.0):
        assert not tenure.is_over(now)
        tenure.renew(epoch, now)
    assert tenure.silent_s(200.0) == 30.0
    assert not tenure.is_over(229.9)
    assert tenure.is_over(230.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "renew"]), st.integers(0, 5), st.floats(0.0, 2 * LEASE_S))))
def test_the_process_that_took_it_last_is_heard_and_all_before_are_refused(
    events: list[tuple[str, int, float]],
) -> None:
    tenure, now, epochs, heard = Tenure(LEASE_S), 0.0, [], 0.0
    for what, who, pause_s in events:
        now += pause_s
        if what == "take":
            epochs.append(tenure.take(now))
            heard = now
        elif epochs and (epoch := epochs[who % len(epochs)]) == epochs[-1]:
            tenure.renew(epoch, now)
            heard = now
        elif epochs:
            with pytest.raises(TakenOver, match="Another process has taken this run over"):
                tenure.renew(epoch, now)
        assert tenure.is_over(now + LEASE_S / 2) == (now + LEASE_S / 2 - heard >= LEASE_S)
    assert epochs == sorted(set(epochs))
