"""Both ends prove that they know the token, and nobody else is answered."""

import pytest

from penstock.network.connection import (
    FINISH_BYTES,
    HELLO,
    REPLY,
    ClientHandshake,
    NotAuthenticated,
    ServerHandshake,
    new_token,
)

TOKEN = bytes(range(32))


def test_two_ends_with_one_token_meet() -> None:
    client, server = ClientHandshake(TOKEN, 7), ServerHandshake(TOKEN)
    reply = server.reply(client.hello)
    server.finish(client.finish(reply))
    assert server.service == 7
    assert (len(client.hello), len(reply)) == (HELLO.size, REPLY.size)


def test_a_client_without_the_token_is_not_answered() -> None:
    with pytest.raises(NotAuthenticated, match="does not begin with this run's token"):
        ServerHandshake(TOKEN).reply(ClientHandshake(new_token(), 7).hello)


def test_a_server_without_the_token_is_found_out() -> None:
    other = new_token()
    client, impostor = ClientHandshake(TOKEN, 7), ServerHandshake(other)
    for reply in (bytes(REPLY.size), impostor.reply(ClientHandshake(other, 7).hello)):
        with pytest.raises(NotAuthenticated, match="another run"):
            client.finish(reply)


def test_a_hello_that_is_repeated_comes_to_nothing() -> None:
    client = ClientHandshake(TOKEN, 7)
    first, second = ServerHandshake(TOKEN), ServerHandshake(TOKEN)
    proof = client.finish(first.reply(client.hello))
    second.reply(client.hello)
    with pytest.raises(NotAuthenticated, match="repeats"):
        second.finish(proof)


def test_the_service_is_part_of_the_proof() -> None:
    hello = bytearray(ClientHandshake(TOKEN, 7).hello)
    hello[len(b"PENSTOCK1")] = 8
    with pytest.raises(NotAuthenticated):
        ServerHandshake(TOKEN).reply(bytes(hello))


def test_a_reply_cannot_be_sent_back_as_a_finish() -> None:
    """Each proof is over other words."""
    client, server = ClientHandshake(TOKEN, 7), ServerHandshake(TOKEN)
    reply = server.reply(client.hello)
    with pytest.raises(NotAuthenticated):
        server.finish(reply[-FINISH_BYTES:])
