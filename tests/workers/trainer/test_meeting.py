"""Ranks meet at a port that one of them holds, and who does not come is named."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest

from penstock.conf.errors import ConfigError, DeadlineExceeded, PartnerGone, ResourceError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer import ranks as meeting_module
from penstock.workers.trainer.ranks import INTERFACE_KEYS, Meeting, Ranks, store_of, use_interface_of

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with closing(Meeting("127.0.0.1")) as opened:
        yield opened


def test_the_port_is_taken_before_anybody_hears_of_it_and_on_one_address_only(meeting: Meeting) -> None:
    port = int(meeting.address.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))


def test_all_ranks_get_the_same_store_once_all_have_come(meeting: Meeting) -> None:
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(store_of, rank, 3, meeting.address, MINUTE) for rank in (2, 0)]
        time.sleep(0.1)
        assert not any(future.done() for future in early)
        stores = [store_of(1, 3, meeting.address, MINUTE), *(future.result() for future in early)]
    stores[0].set("said", "once")
    assert [store.get("said") for store in stores] == [b"once"] * 3


@pytest.mark.parametrize(("num_ranks", "who"), [(2, "rank 1"), (4, "ranks 1, 2, 3")])
def test_ranks_that_do_not_come_are_named(meeting: Meeting, num_ranks: int, who: str) -> None:
    with pytest.raises(DeadlineExceeded, match=f"rank 0 of {num_ranks}: {who} did not come to 127.* within 1 s"):
        store_of(0, num_ranks, meeting.address, SECOND)


def test_a_meeting_that_nobody_holds_is_named() -> None:
    with closing(Meeting("127.0.0.1")) as closed:
        address = closed.address
    with pytest.raises(DeadlineExceeded, match=rf"rank 1 of 2 could not reach rank 0 at {address} within 1 s"):
        store_of(1, 2, address, SECOND)


def test_a_holder_that_goes_while_others_wait_is_named(meeting: Meeting) -> None:
    threading.Timer(0.2, meeting.close).start()
    with pytest.raises(PartnerGone, match=r"rank 1 of 2: rank 0, who holds .* is gone"):
        store_of(1, 2, meeting.address, MINUTE)


def test_several_ranks_without_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks=2 needs the address where the ranks meet"):
        Ranks.join(TrainerConfig(), 0, 2)


def test_ranks_that_cannot_connect_are_told_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ResourceError, match=r"rank 0 of 1 could not connect .*none0.* GLOO_SOCKET_IFNAME"):
        Ranks.join(TrainerConfig())
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    Ranks.join(TrainerConfig()).leave()


def test_the_interface_of_the_node_is_told_to_gloo_and_nccl_unless_the_user_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in INTERFACE_KEYS:
        monkeypatch.setenv(key, "")  # so that it is put back
        monkeypatch.delenv(key)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface_of("127.0.0.1")
    use_interface_of("203.0.113.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(meeting_module, "interface_of", {"10.0.0.2": "eth1"}.get)
    use_interface_of("10.0.0.2")
    assert [os.environ[key] for key in INTERFACE_KEYS] == ["eth1", "ib0"]
    del os.environ["NCCL_SOCKET_IFNAME"]
    use_interface_of("10.0.0.2")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
