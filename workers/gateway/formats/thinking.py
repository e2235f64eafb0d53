"""What a model thinks before it speaks."""

BEGIN, END = "<think>", "</think>"


def split_thinking(text: str, *, begun: bool = False) -> tuple[str | None, str]:
    """Thinking, and what is said after it. None: there is none. `begun`: the prompt has begun the thinking, so that
    all is thinking if it was cut off before an end.

    >>> split_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    >>> split_thinking("4")
    (None, '4')
    """
    thinking, end, said = text.partition(END)
    if not end:
        if text.lstrip().startswith(BEGIN):  # cut off while it thought
            return text.partition(BEGIN)[2].strip("\n"), ""
        return (text.strip("\n"), "") if begun else (None, text)
    return thinking.partition(BEGIN)[2].strip("\n") if BEGIN in thinking else thinking.strip("\n"), said.lstrip("\n")
