r"""Writes a final answer as math_verify is to read it: thousands without separators, lists as formulas. Pure.

    1,234       ─▶ 1234             (1,234, 5)      ─▶ $(1234, 5)$
    1,2         ─▶ $1,2$            (1,234)         ─▶ $(1,234)$      a point
    1 and 2     ─▶ $1, 2$           It is (1, 2).   ─▶ $(1, 2)$
    \[1,234\]   ─▶ \[1234\]         $1$, 2          ─▶ $1, 2$

A comma stands between thousands where groups of three digits follow it, as far as the number goes. In brackets whose
commas are all without blanks it stands between the entries. Brackets with words in them hold none, and those of `\[`
and `\(` are none.
"""

import re

ANSWER_MARK = "####"
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)/(\d+)")
_OPEN, _CLOSED = "([{", ")]}"
_DELIMITER = re.compile(r"(?<!\\)\\[\[\]()]")
"""Delimiters `\\[`, `\\(` and their ends: as a dollar they begin and end a formula."""
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OF_A_COMMAND = re.compile(r"[\w}^]")
"""Pattern of the character before a brace that holds a command's argument, and no set."""
MOST_CHARACTERS = 200
"""Largest length of an answer that is nothing but a formula, and of the text looked at on each side of a number."""
_AND = re.compile(r"\s*,?\s+(?:and|or)\s+")


def final_answer(text: str) -> str:
    """The text after the last `####` (the format of GSM8K), or the whole text."""
    return text.rpartition(ANSWER_MARK)[2].strip()


def ungrouped(text: str) -> str:
    """The text with numbers such as 1,234 as 1234. "1,2", "1, 234" and the point "(1,234)" stay as they are."""
    text = _LATEX_COMMA.sub(",", text)
    seen = _DELIMITER.sub("$$", text)
    return _GROUPED.sub(lambda number: number[0] if _is_in_list(seen, number) else number[0].replace(",", ""), text)


def plain(text: str) -> str:
    """The text as it is compared with another, without blanks that separate no words or digits."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text.strip().rstrip(".").replace("$", ""))


def formula(text: str) -> str:
    """A list, an interval or a mixed number as LaTeX: the whole answer, or a list that ends a sentence. Empty where
    there is none, and for what is LaTeX already."""
    bare = _undelimited(text.strip().rstrip("."))
    if "$" in bare or "\\boxed" in bare or _DELIMITER.search(bare):
        return ""
    if mixed := _MIXED.fullmatch(bare):
        return f"${mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}$"
    joined = _AND.sub(", ", bare) if len(bare) <= MOST_CHARACTERS else bare
    if len(bare) > MOST_CHARACTERS or _has_words(joined):
        return _last_list(bare)
    return f"${joined}$" if "," in joined or ";" in joined or joined[:1] in tuple(_OPEN) else ""


def _undelimited(text: str) -> str:
    """A list whose entries are formulas of their own, as "$1$, 2" or "$1$ and $2$", without the dollars."""
    outside = _AND.sub(", ", " ".join(text.split("$")[::2]))
    is_list = "$" in text and len(text) <= MOST_CHARACTERS and text.count("$") % 2 == 0 and re.search("[,;]", outside)
    return text.replace("$", "") if is_list and not re.search("[a-zA-Z]", outside) else text


def _has_words(text: str) -> bool:
    return re.search(r"[a-zA-Z]{2}", _COMMAND.sub("", text)) is not None


def _last_list(text: str) -> str:
    """The list in brackets that a sentence ends with. A number in brackets is none, nor are words."""
    start = max(map(text.rfind, _OPEN))
    inside = text[start + 1 : -1]
    is_list = start >= 0 and text[-1] in _CLOSED and re.fullmatch(r"[^()\[\]{}]+", inside) and re.search("[,;]", inside)
    return f"${text[start:]}$" if is_list and not _GROUPED.fullmatch(inside) and not _has_words(inside) else ""


def _is_in_list(text: str, number: re.Match[str]) -> bool:
    """Return whether the innermost brackets around the number have entries of which none is set apart by a blank."""
    start, end = _around(text, number.start(), number.end())
    if start < 0 or (text[start] == "{" and start > 0 and _OF_A_COMMAND.match(text[start - 1])):
        return False
    inside = text[start + 1 : end]
    return not re.search(r"[,;]\s|;", inside) and not _has_words(inside)


def _around(text: str, start: int, end: int) -> tuple[int, int]:
    """The places of the brackets, -1 where nothing opens; the text's end where nothing closes."""
    depth, before, first = 0, start - 1, max(0, start - MOST_CHARACTERS)
    while before >= first and (depth or text[before] not in _OPEN):
        depth += (text[before] in _CLOSED) - (text[before] in _OPEN)
        before -= 1
    depth, after, last = 0, end, min(len(text), end + MOST_CHARACTERS)
    while after < last and (depth or text[after] not in _CLOSED):
        depth += (text[after] in _OPEN) - (text[after] in _CLOSED)
        after += 1
    return before if before >= first else -1, after
