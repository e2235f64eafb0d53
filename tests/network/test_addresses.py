from penstock.network.addresses import interface_of


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # of RFC 5737, nobody's
