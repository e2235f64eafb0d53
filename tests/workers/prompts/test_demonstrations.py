"""Demonstrations and pairs have the tokens that the model's own chat template writes."""

from typing import Any

import pytest

from penstock.conf.data import DataConfig
from penstock.conf.errors import ModelError
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import character_tokenizer
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from tests.workers.agents.gateway.formats.real_templates import TRL_TEMPLATES, trl_tokenizer

ROW = DatasetRow("What is 2+2?", "4", 0, "row 0", response="It is 4.", rejected="It is 5.")
WITHOUT_TEXTS = ("idefics3", "llava_next", "smolvlm")
"""Templates of models that see, which take nothing but lists of parts."""
REWRITTEN = ("deepseek_r1", "deepseekv3", "nemotron_3", "qwen3_8")
"""Templates that begin thinking in the prompt, and leave it out of an answered conversation."""
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "gemma4": "<turn|>", "gemma": "<end_of_turn>", "diffusion_gemma": "<turn|>",
    "gptoss": "<|return|>", "llama": "<|eot_id|>", "phi": "<|end|>", "muse": "<|eot|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "lfm": "<|im_end|>", "qwen": "<|im_end|>", "nemotron": "<|im_end|>", "glm": "", "glm4moe_training": "<|user|>",
}  # fmt: skip
"""Tokens that end a turn, by the beginnings of templates' names; empty for the end-of-sequence token."""


def encoder_of(tokenizer: Any, **options: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, DataConfig(), TokenLimits(10_000, 10_000, "enough"), **options)


def end_of(name: str) -> str:
    return ENDS[max((begin for begin in ENDS if name.startswith(begin)), key=len)]


@pytest.mark.parametrize("name", [name for name in TRL_TEMPLATES if not name.startswith(WITHOUT_TEXTS)])
def test_a_demonstration_is_what_the_template_writes_until_the_turn_ends(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    end = end_of(name) or tokenizer.eos_token
    encoder = encoder_of(tokenizer, end_ids=tokenizer.convert_tokens_to_ids([end]))
    prompt, response = encoder.demonstration(ROW)
    asked = {"role": "user", "content": ROW.prompt}
    answered = [asked, {"role": "assistant", "content": ROW.response}]
    written = str(tokenizer.apply_chat_template(answered, tokenize=False))
    said = tokenizer.decode([*prompt.ids, *response])
    upto, found, _ = written.rpartition(end)
    assert said == (upto if found else written) + end
    assert response[-1] == tokenizer.convert_tokens_to_ids(end)
    if not name.startswith(REWRITTEN):
        assert prompt.ids == encoder.prompt(ROW).ids
        assert not encoder.is_rewritten(ROW)


@pytest.mark.parametrize("name", [name for name in TRL_TEMPLATES if not name.startswith(WITHOUT_TEXTS)])
def test_both_responses_of_a_pair_follow_one_prompt(name: str) -> None:
    encoder = encoder_of(trl_tokenizer(name))
    prompt, chosen, rejected = encoder.preference(ROW)
    demonstrated, response = encoder.demonstration(ROW)
    assert (prompt.ids, chosen) == (demonstrated.ids, response)
    assert len(chosen) == len(rejected)
    assert [one for one, other in zip(chosen, rejected, strict=True) if one != other] == encoder.tokenizer("4")[
        "input_ids"
    ]


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3"])
def test_an_answer_without_thinking_stands_after_its_end(name: str) -> None:
    encoder = encoder_of(trl_tokenizer(name))
    _, response = encoder.demonstration(ROW)
    assert "</think>\n\nIt is 4.<|im_end|>" in encoder.tokenizer.decode(response)


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_a_template_that_writes_answered_conversations_otherwise_is_noticed(name: str) -> None:
    encoder = encoder_of(trl_tokenizer(name))
    assert encoder.is_rewritten(ROW)
    prompt, _ = encoder.demonstration(ROW)
    assert not encoder.tokenizer.decode(prompt.ids).endswith("<think>\n")


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_template_that_leaves_answers_out_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="leaves out what the assistant says"):
        encoder_of(trl_tokenizer(name)).demonstration(ROW)


def test_the_turn_ends_where_the_models_generation_stops() -> None:
    tokenizer = trl_tokenizer("phi3")
    (end,) = tokenizer.convert_tokens_to_ids(["<|end|>"])
    _, until_eos = encoder_of(tokenizer).demonstration(ROW)
    _, response = encoder_of(tokenizer, end_ids=[end]).demonstration(ROW)
    assert response[-1] == end
    assert until_eos[: len(response)] == response
    assert until_eos[-1] == tokenizer.eos_token_id


def test_the_template_of_fresh_models_gives_the_text_and_the_end_of_sequence() -> None:
    tokenizer = character_tokenizer(FreshModelConfig())
    prompt, response = encoder_of(tokenizer).demonstration(ROW)
    assert tokenizer.decode(prompt.ids) == "What is 2+2?\n"
    assert tokenizer.decode(response) == "It is 4.<eos>"
