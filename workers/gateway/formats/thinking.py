"""What a model thinks before it speaks."""

BEGIN, END = "<think>", "</think>"


def split_thinking(text: str) -> tuple[str | None, str]:
    """Thinking, and what is said after it. None: there is none. A template may have begun the thinking itself.

    >>> split_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    >>> split_thinking("4")
    (None, '4')
    """
    thinking, end, said = text.partition(END)
    if not end:
        if text.lstrip().startswith(BEGIN):  # cut off while it thought
            return text.partition(BEGIN)[2].strip("\n"), ""
        return None, text
    return thinking.partition(BEGIN)[2].strip("\n") if BEGIN in thinking else thinking.strip("\n"), said.lstrip("\n")
