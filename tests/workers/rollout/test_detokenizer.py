"""Text of responses: what special tokens leave in it, and which of them can be stop strings."""

from typing import Any

import pytest

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import EOS, character_tokenizer
from penstock.workers.models.tokenizer import split_thinking
from penstock.workers.rollout.detokenizer import Detokenizer

RESPONSES = {
    "most": ("<think>\n2+2\n</think>\n\n4", ("<think>", "</think>")),
    "mistral": ("[THINK]2+2[/THINK]4", ("[THINK]", "[/THINK]")),
    "gpt-oss": (
        "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"),
    ),
    "gemma4": ("<|channel>thought\n2+2\n<channel|>4<turn|>", ("<|channel>", "<channel|>", "<turn|>")),
    "muse": (
        " to=self<|message|>2+2<|eom|><|start|>assistant to=user<|message|>4<|eot|>",
        ("<|message|>", "<|eom|>", "<|start|>", "<|eot|>"),
    ),
    "cohere": (
        "<|START_THINKING|>2+2<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
}


def tokenizer_with(special: tuple[str, ...]) -> Any:
    from tokenizers import AddedToken

    tokenizer = character_tokenizer(FreshModelConfig())
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("family", RESPONSES)
def test_the_text_shows_where_the_thinking_ends_and_no_other_special_token(family: str) -> None:
    said, special = RESPONSES[family]
    tokenizer = tokenizer_with(special)
    ids = tokenizer(said)["input_ids"]
    text = Detokenizer(tokenizer).text([*ids, tokenizer.eos_token_id])
    thinking, answer = split_thinking(text)
    assert thinking is not None
    assert thinking.startswith("2+2")
    assert answer == "4"


@pytest.mark.parametrize("family", RESPONSES)
def test_a_response_that_is_cut_inside_its_thinking_has_no_answer(family: str) -> None:
    said, special = RESPONSES[family]
    tokenizer = tokenizer_with(special)
    ids = tokenizer(said.partition("+2")[0])["input_ids"]
    assert split_thinking(Detokenizer(tokenizer).text(ids)) == ("2", "")


def test_a_text_that_a_stop_string_cut_keeps_its_marks() -> None:
    tokenizer = tokenizer_with(("[THINK]", "[/THINK]"))
    ids = tokenizer("[THINK]2+2[/THINK]4. So")["input_ids"]
    assert Detokenizer(tokenizer).cut(ids, "2+24") == "[THINK]2+2[/THINK]4"
    assert Detokenizer(tokenizer).cut(ids[-5:], "4") == "4"


def test_stop_strings_that_are_special_tokens_are_ids() -> None:
    tokenizer = tokenizer_with(("<|im_end|>",))
    (im_end,) = tokenizer("<|im_end|>")["input_ids"]
    stops = ("<|im_end|>", "\n\n", EOS)
    assert Detokenizer(tokenizer).stop_ids(stops) == {im_end, tokenizer.eos_token_id}
