import socket

from penstock.network.machine import free_address, interface_of


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # of RFC 5737, nobody's


def test_a_free_address_can_be_listened_on() -> None:
    host, _, port = free_address("127.0.0.1").rpartition(":")
    with socket.create_server((host, int(port))):
        assert host == "127.0.0.1"
