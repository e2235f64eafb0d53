"""Addresses are of this machine; the limit of open files is raised as far as it goes, and told where that is low."""

import resource
import socket
import subprocess
import sys

import pytest

from penstock.network.host import FILES_PER_CLIENT, LOW_LIMIT, free_address, interface_of
from penstock.store.data.remote_rows import MOST_IDLE


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # of RFC 5737, nobody's


def test_a_free_address_can_be_listened_on() -> None:
    host, _, port = free_address("127.0.0.1").rpartition(":")
    with socket.create_server((host, int(port))):
        assert host == "127.0.0.1"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from penstock.network.host import raise_limit, warning
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(warning())
"""


def test_a_member_counts_with_calls_heartbeat_and_what_it_keeps_open_for_rows() -> None:
    assert FILES_PER_CLIENT == 2 + MOST_IDLE


@pytest.mark.real
@pytest.mark.parametrize("hard", [512, LOW_LIMIT])
def test_the_soft_limit_becomes_the_hard_one_which_is_told_where_it_is_low(hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = [sys.executable, "-c", LIMITED, str(hard)]
    raised, told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert raised == f"{hard} {hard}"
    assert (told == "None") == (hard >= LOW_LIMIT)
    if hard == 512:
        assert "512 files open" in told
        assert "at most about 74 members" in told
        assert "ulimit -Hn" in told
