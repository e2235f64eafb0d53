r"""The rewards that Penstock brings and that execute nothing: `reward.function=math_verify`, `reasoning_gym`, `label`
or `digits`. Those that execute something are in `code.py`.

Each runs in the pool's child processes. Heavy imports are made by `warm`, before the first sample's deadline starts.

A final answer is written as math_verify is to read it: thousands without separators, lists as formulas.

    1,234       ─▶ 1234             (1,234, 5)      ─▶ $(1234, 5)$
    1,2         ─▶ $1,2$            (1,234)         ─▶ $(1,234)$      a point
    1 and 2     ─▶ $1, 2$           It is (1, 2).   ─▶ $(1, 2)$
    \[1,234\]   ─▶ \[1234\]         $1$, 2          ─▶ $1, 2$

A comma stands between thousands where groups of three digits follow it, as far as the number goes. In brackets whose
commas are all without blanks it stands between the entries. Brackets with words in them hold none, and those of `\[`
and `\(` are none.
"""

import functools
import importlib
import logging
import re
from collections.abc import Mapping
from typing import Any

from penstock.workers.problems import verify
from penstock.workers.reward.registry import reward

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


def _warm_math_verify(_options: Mapping[str, Any]) -> None:
    # math-verify warns that its signal-based timeouts are off; the pool's own deadline stands in for them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parsed_gold("1")


def _math_verify() -> Any:
    return importlib.import_module("math_verify")


@functools.lru_cache(maxsize=4096)
def _parsed_gold(answer: str) -> Any:
    return _parsed(answer) or _math_verify().parse(f"${answer}$", parsing_timeout=None)


def _parsed(text: str) -> Any:
    parse = functools.partial(_math_verify().parse, parsing_timeout=None)
    return ((written := formula(text)) and parse(written)) or parse(text)


@reward("math_verify", warm=_warm_math_verify)
def math_verify(response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference mathematically, else 0.0.

    The final answer stands after `####`, in `\\boxed{}`, or is the last number, list or formula of the response. Commas
    separate thousands where groups of three digits follow, and entries elsewhere. Raises
    `ValueError` if the reference answer itself cannot be read.
    """
    gold, said = ungrouped(final_answer(str(answer))), ungrouped(final_answer(response))
    if not said:
        return 0.0
    if plain(said) == plain(gold):
        return 1.0
    parsed = _parsed_gold(plain(gold) if plain(gold).lstrip("+-").replace(".", "", 1).isdigit() else gold)
    if not parsed:
        raise ValueError(f"the reference answer {gold!r:.80} is no mathematical expression")
    return float(_math_verify().verify(parsed, _parsed(said), timeout_seconds=None))


def _warm_reasoning_gym(_options: Mapping[str, Any]) -> None:
    importlib.import_module("reasoning_gym")


@reward("reasoning_gym", warm=_warm_reasoning_gym)
def reasoning_gym(response: str, task: dict[str, Any], strict: bool = False) -> float:
    """The score of the problem's own verifier, from 0 to 1. `strict`: 1.0 for full marks, else 0.0."""
    score = verify(response.strip(), task)
    return float(score >= 1.0) if strict else score


@reward("label")
def label(response: str, task: dict[str, Any], column: str = "label") -> float:
    """The score that the dataset gives to its own response: a column of numbers, or of true and false. Raises
    `ValueError` for a row without one."""
    value = task.get(column)
    if not isinstance(value, int | float):
        raise ValueError(f"column {column!r} holds {type(value).__name__} {value!r:.40}, where a number or bool is due")
    return float(value)


@reward("digits")
def digits(response: str, task: dict[str, Any] | None = None) -> float:
    """Share of the response's characters that are digits 0-9; 0 for an empty response. Learnt within a few steps."""
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0


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
