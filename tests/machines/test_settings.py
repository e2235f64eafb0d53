"""What `machines` makes of its arguments."""

import pytest

from tests.machines.cluster import Cluster, kept_folders, machines
from tests.machines.switch import LEAST_BURST_BYTES, bits_per_s, limit


def test_rates_are_written_as_tc_takes_them() -> None:
    assert [bits_per_s(rate) for rate in ("800kbit", "200mbit", "2.5gbit")] == [8e5, 2e8, 2.5e9]
    for wrong in ("200", "200mb", "fast", "0mbit", "-1mbit"):
        with pytest.raises(ValueError, match="write it like 200mbit"):
            bits_per_s(wrong)


@pytest.mark.parametrize(("rate", "burst"), [("16mbit", LEAST_BURST_BYTES), ("1gbit", 1_250_000)])
def test_a_limit_lets_a_hundredth_of_a_second_or_a_few_packets_through_at_once(rate, burst) -> None:
    assert f"rate {rate} burst {burst}b" in limit("eth0", rate)


def test_folders_that_a_private_tmp_hides_are_kept_once() -> None:
    assert [str(folder) for folder in kept_folders(["/usr", "/tmp/a/b", "/tmp/a", "/tmp/c/../c"])] == [
        "/tmp/a",
        "/tmp/c",
    ]


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/dev/shm/x"])
def test_what_machines_have_of_their_own_cannot_be_kept(folder) -> None:
    with pytest.raises(ValueError, match="name a folder below /tmp"):
        kept_folders([folder])


def test_senseless_sizes_and_numbers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="4 machines: 1 to 3"), machines(4):
        pass
    with pytest.raises(ValueError, match="shm has 1 values for 2 machines"), machines(2, shm=["1g"]):
        pass
    with pytest.raises(IndexError, match="there is no machine 0"):
        Cluster([])[0]
