"""A model's tokenizer, and how the model's texts are read: what its chat template writes after an answer, and where the
thinking in an answer ends.

    thinking      <think>…</think>, [THINK]…[/THINK], and others of `MARKS`         before what is said
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from penstock.conf.errors import ModelError

ANSWER = "\u2042"
"""Placeholder for an answer in a text of the chat template."""
QUESTION = {"role": "user", "content": "."}
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("to=self<|message|>", "to=user<|message|>"),
)
"""Marks of thinking: of most models, of Mistral's, gpt-oss, Gemma 4, Cohere's and Muse Glimmer."""
BETWEEN = re.compile(r"<\|(?:end|eom)\|><\|start\|>assistant ?\Z")
"""Pattern of what stands between thinking and answer, where these are turns of their own."""


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a HF model directory or hub id. Raises `ModelError`."""
    transformers = importlib.import_module("transformers")  # takes a second
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from error


def generation_ends(tokenizer: Any) -> list[int]:
    """Tokens at which the model of a tokenizer stops by its generation_config.json; none without this file."""
    transformers = importlib.import_module("transformers")
    try:
        ends = transformers.GenerationConfig.from_pretrained(getattr(tokenizer, "name_or_path", "")).eos_token_id
    except (OSError, ValueError):
        return []
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def answer_ending(write: Callable[[list[dict[str, Any]]], str], consequence: str) -> str:
    """The text that a chat template writes directly after an answer. `write`: writes messages by the template. Raises
    `ModelError`, with the `consequence`, for a template that leaves answers out."""
    _, answer, ending = write([dict(QUESTION), {"role": "assistant", "content": ANSWER}]).rpartition(ANSWER)
    if not answer:
        raise ModelError(f"the model's chat template leaves out what the assistant says{consequence}")
    return ending


def split_thinking(text: str, *, begun: bool = False) -> tuple[str | None, str]:
    """Split a text into thinking, and what is said after it. None: there is no thinking. `begun`: the prompt has begun
    the thinking, so that all is thinking if it was cut off before an end.

    >>> split_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    >>> split_thinking("<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4")
    ('2+2', '4')
    >>> split_thinking("4")
    (None, '4')
    """
    for begin, end in MARKS:
        thinking, mark, said = text.partition(end)
        if mark:
            thinking = thinking.partition(begin)[2] if begin in thinking else thinking
            return BETWEEN.sub("", thinking).strip("\n"), said.lstrip("\n")
        if text.lstrip().startswith(begin):  # cut off while it thought
            return text.partition(begin)[2].strip("\n"), ""
    return (text.strip("\n"), "") if begun else (None, text)


def begins_thinking(prompt: str) -> bool:
    """Return whether a prompt ends where the model is to think."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in MARKS))
