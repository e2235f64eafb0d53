"""Bodies of requests: what is unknown is skipped, what is wrong is named, and no parser holds up everybody else."""

import json
import tracemalloc

import pytest

from penstock.serve.sdk_messages import PROTOBUF, Body, TooLarge, messages, numbered, read
from penstock.workers.agents.gateway.client_errors import BadRequest

LISTS = 2**20 // 3 * b"[],"


def test_fields_that_are_unknown_are_skipped_and_not_built():
    body = b'{"a": [' + LISTS + b'[]], "session_id": "x"}'
    read(Body, body)
    tracemalloc.start()
    assert read(Body, body).session_id == "x"
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


@pytest.mark.parametrize(("body", "words"), [
    ({"session_id": 1}, "session_id: Expected `str"), ([], "object"),
])  # fmt: skip
def test_a_field_of_another_type_is_named(body, words):
    with pytest.raises(BadRequest, match=words):
        read(Body, json.dumps(body).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a":' + b"[" * 10**5])
def test_what_is_no_json_is_refused(body):
    with pytest.raises(BadRequest, match="JSON"):
        read(Body, body)


def field(number, data):
    """A field of a message that is one itself, or bytes."""
    size, head = len(data), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + data


HOSTILE = {
    "data": 2**20 * field(3, b""), "chunks": field(3, 2**20 * field(1, b"")), "unknown": 2**20 * field(15, b""),
    "torn": 2**21 * b"\x80", "endless": 2**21 * b"\xff",
    "values": b'{"model_input":{"chunks":[{"tokens":[' + 2**21 * b"1," + b"1]}]}}",
    "names": b'{"forward_input":{"loss_fn_config":{' + b'"a":1,' * 2**17 + b'"b":1}}}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_whose_parser_would_hold_up_everybody_is_refused(name):
    with pytest.raises(BadRequest if name in ("torn", "endless") else TooLarge):
        numbered(HOSTILE[name], "" if HOSTILE[name].startswith(b"{") else PROTOBUF)


def test_metadata_is_not_built_before_its_size_is_known():
    body = b'{"user_metadata": {"a": [' + LISTS + b"[]]}}"
    tracemalloc.start()
    with pytest.raises(BadRequest, match="more than"):
        read(Body, body)
    assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    tracemalloc.stop()


def test_requests_of_many_sequences_and_of_a_long_one_are_taken():
    message = messages().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(1024):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(1200)
        for column in ("target_tokens", "weights", "logprobs", "advantages"):
            datum.loss_fn_inputs[column].CopyFrom(messages().Tensor(dense=bytes(1200), dtype=1, shape=[300]))
    body = message.SerializeToString()
    assert len(body) > 2**20
    assert numbered(body, PROTOBUF)[2] == 1024 * 300
    inputs = {"chunks": [{"type": "encoded_text", "tokens": [151643] * 250_000}]}
    given = {"loss_fn": "x", "data": [{"model_input": inputs, "loss_fn_inputs": {}}]}
    assert numbered(json.dumps({"forward_input": given}).encode(), "")[2] == 250_000
