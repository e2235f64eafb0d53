"""The thinking of a model, separated from its answer."""

import re

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks of thinking: of most models, and of Mistral's."""
EMPTY = re.compile(r"<think>\s*</think>\n*")
"""Pattern of empty thinking, as templates write it."""


def split_thinking(text: str, *, begun: bool = False) -> tuple[str | None, str]:
    """Split a text into thinking, and what is said after it. None: there is no thinking. `begun`: the prompt has begun
    the thinking, so that all is thinking if it was cut off before an end.

    >>> split_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    >>> split_thinking("4")
    (None, '4')
    """
    for begin, end in MARKS:
        thinking, mark, said = text.partition(end)
        if mark:
            thinking = thinking.partition(begin)[2] if begin in thinking else thinking
            return thinking.strip("\n"), said.lstrip("\n")
        if text.lstrip().startswith(begin):  # cut off while it thought
            return text.partition(begin)[2].strip("\n"), ""
    return (text.strip("\n"), "") if begun else (None, text)


def begins_thinking(prompt: str) -> bool:
    """Return whether a prompt ends where the model is to think."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in MARKS))
