"""What makes two conversations the same."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.agents.gateway.conversation import history_key, text_of
from tests.workers.agents.gateway.chat_models import ADD


def call(arguments: Any, call_id: str = "1") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    ]}  # fmt: skip


def test_what_harnesses_add_makes_no_difference() -> None:
    plain = {"role": "user", "content": "hello"}
    for other in (
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "hello\n", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ):
        assert history_key([plain], []) == history_key([other], [])


def test_arguments_are_the_same_as_text_and_as_an_object_and_ids_do_not_count() -> None:
    one = history_key([call({"a": 1, "b": 2})], [])
    assert one == history_key([call('{"b":2,  "a": 1}', "other")], [])
    assert history_key([call({})], []) == history_key([call("")], [])
    assert one != history_key([call({"a": 1, "b": 3})], [])


def test_thinking_does_not_count_as_clients_drop_it() -> None:
    assert history_key([call({}) | {"reasoning_content": "hm"}], []) == history_key([call({})], [])


def test_who_speaks_what_is_said_which_calls_and_which_tools_count() -> None:
    base = [{"role": "user", "content": "a"}]
    others = [
        ([{"role": "system", "content": "a"}], []),
        ([{"role": "user", "content": "b"}], []),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "a"}], []),
        (base, [ADD]),
        ([call({})], []),
    ]
    keys = {history_key(messages, tools) for messages, tools in [(base, []), *others]}
    assert len(keys) == 6


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert history_key([call("{a")], []) == history_key([call("{a")], [])
    assert history_key([call("{a")], []) != history_key([call("{b")], [])
    assert history_key([call("[" * 100_000)], []) != history_key([call("{b")], [])


def test_text_is_read_from_whatever_a_content_is() -> None:
    assert [text_of(None), text_of("a"), text_of([{"text": "a"}, "b"]), text_of(4)] == ["", "a", "ab", "4"]


WORDS = st.text(alphabet="ab ", max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), max_size=4),
       st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), max_size=4))  # fmt: skip
def test_keys_are_equal_exactly_if_the_messages_are(one: list[Any], other: list[Any]) -> None:
    def key(said: list[Any]) -> bytes:
        return history_key([{"role": role, "content": text} for role, text in said], [])

    same = json.dumps([[role, text.strip()] for role, text in one]) == json.dumps(
        [[role, text.strip()] for role, text in other]
    )
    assert (key(one) == key(other)) == same
