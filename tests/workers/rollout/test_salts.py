"""A prompt's version is the salt of what vLLM caches of it."""

from types import SimpleNamespace
from typing import Any

from penstock.workers.rollout.kept_sequences import salted, unread_requests


def test_a_prompt_of_text_is_salted_by_its_version() -> None:
    prompt = {"prompt_token_ids": [1, 2]}
    assert salted(prompt, 7, with_pictures=True) == {"type": "token", "prompt_token_ids": [1, 2], "cache_salt": "7"}
    assert prompt == {"prompt_token_ids": [1, 2]}


def test_features_of_pictures_are_salted_unless_all_versions_compute_the_same() -> None:
    prompt: Any = {"type": "multimodal", "prompt_token_ids": [1], "mm_hashes": {"image": ["a", "b"]}}
    moved = salted(prompt, 7, with_pictures=True)
    assert (moved["type"], moved["cache_salt"], moved["mm_hashes"]) == ("multimodal", "7", {"image": ["7/a", "7/b"]})
    assert salted(prompt, 7, with_pictures=False)["mm_hashes"] == {"image": ["a", "b"]}


def test_requests_without_a_token_are_found_by_the_ids_that_they_were_given() -> None:
    def state(request: str, count: int) -> Any:
        return SimpleNamespace(external_req_id=request, detokenizer=SimpleNamespace(num_output_tokens=lambda: count))

    states = {f"{request}-x": state(request, count) for request, count in {"4": 0, "5": 3, "6": 0}.items()}
    assert unread_requests(SimpleNamespace(request_states=states)) == ["4", "6"]
