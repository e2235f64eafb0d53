r"""The rewards that Penstock brings and that execute nothing: `reward.function=math_verify`, `reasoning_gym`, `label`
or `digits`. Those that execute something are in `code.py`.

Each runs in the pool's child processes. Heavy imports are made by `warm`, before the first sample's deadline starts.

Final answers of mathematics: where they stand in a text, and whether two of them are equal.

    response ─▶ one notation ─▶ the answer: after `####`, in the last box, or the whole text ─▶ math-verify's expression

An answer that has no words, such as `4\sqrt{5}` in a box, is one formula. In prose the last number, list or formula is
the answer. Commas are read by these rules:

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
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from penstock.workers.problems import verify
from penstock.workers.reward.reward_registry import reward

ANSWER_MARK = "####"
MOST_CHARACTERS = 200
"""Largest length of an answer that is nothing but a list, and of the text looked at on each side of a number."""
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\s?\d{3}(?!\d))\s?")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)/(\d+)")
_OPEN, _CLOSED = "([{", ")]}"
_DELIMITER = re.compile(r"(?<!\\)\\[\[\]()]")
"""Delimiters `\\[`, `\\(` and their ends: as a dollar they begin and end a formula."""
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]*\}|\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_OF_A_COMMAND = re.compile(r"[\w}^]")
"""Pattern of the character before a brace that holds a command's argument, and no set."""
_AND = re.compile(r"\s*,?\s+(?:and|or)\s+")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_IN_BASE = re.compile(r"(\w+)_\{?(\d+)\}?")
_BLANKS = re.compile(r"[1-9]\d{0,2}(?:[ \u00a0\u202f]\d{3})+")
"""A number with blanks between thousands."""
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "∞": r"\infty ", "π": r"\pi ",
    "°": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∩": r"\cap ",
})  # fmt: skip
_NOTATIONS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"[½¼¾⅐-⅞]"), lambda found: "\\frac{{{}}}{{{}}}".format(*_compatible(found).split("⁄"))),
    (re.compile(r"[⁰¹²³⁴-⁹]+"), lambda found: f"^{{{_compatible(found)}}}"),
    (re.compile(r"[０-９．，＋－]"), lambda found: _compatible(found)),
    (re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|\w))"), r"\\sqrt{\1\2\3}"),
    (re.compile(r"\\\$"), lambda _: ""),
    (re.compile(r"(?<!\\)%"), lambda _: r"\%"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])"), r"\1\\cdot 10^{\2}"),
    (re.compile(r"\^(-\d+|\d{2,})"), r"^{\1}"),
)  # fmt: skip
"""Ways to write a sign or number, each with how LaTeX writes it."""


@dataclass(frozen=True)
class Answer:
    """`is_alone`: nothing but the answer stands in the text."""

    text: str
    is_alone: bool

    @classmethod
    def of(cls, text: str) -> "Answer":
        """The final answer of a response, or a reference."""
        text = in_one_notation(text)
        marked, is_marked = text.rpartition(ANSWER_MARK)[2].strip(), ANSWER_MARK in text
        boxed = last_box(marked)
        answer = marked if boxed is None else boxed.strip()
        if _BLANKS.fullmatch(answer):
            answer = re.sub(r"\s", "", answer)
        return cls(ungrouped(answer), is_marked or boxed is not None or not _has_words(answer))


def are_equal(gold: Answer, said: Answer) -> bool:
    """Whether an answer equals the reference mathematically. Raises `ValueError` if math-verify cannot read the
    reference."""
    if not said.text:
        return False
    one, other = plain(gold.text), plain(said.text)
    if one == other:
        return True
    if _IN_BASE.fullmatch(one) or _IN_BASE.fullmatch(other):
        return _digits_and_base(one) == _digits_and_base(other)
    numbers = _number(one), _number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return abs(numbers[0] - numbers[1]) <= min(Decimal(1), abs(numbers[0])) * Decimal("1e-6")
    parsed = _parsed_gold(gold if numbers[0] is None else Answer(one, True))
    if not parsed:
        raise ValueError(f"the reference answer {gold.text!r:.80} is no mathematical expression")
    verify = functools.partial(_math_verify().verify, timeout_seconds=None, float_rounding=_decimals(parsed))
    return bool(verify(parsed, _parsed(said)))


def in_one_notation(text: str) -> str:
    """The text with signs, powers, roots and percents as LaTeX writes them."""
    text = text.translate(_SIGNS)
    for pattern, written in _NOTATIONS:
        text = pattern.sub(written, text)
    return text


def _compatible(found: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", found[0])


def last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{}`, or in the last ones, joined by commas, where only "and" or a comma is between
    them. None without a box that is closed."""
    found: list[str] = []
    start = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        end = _closing(text, box.end())
        if end < 0 or (found and not re.fullmatch(r"[\s$,]*(?:,|and|or)[\s$]*", text[end + 1 : start])):
            break
        found.insert(0, text[box.end() + 1 : end])
        start = box.start()
    return ", ".join(found) if found else None


def _closing(text: str, start: int) -> int:
    """The place of the brace that closes the one at `start`; -1 without one."""
    if text[start : start + 1] != "{":
        return -1
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place
    return -1


def _math_verify() -> Any:
    return importlib.import_module("math_verify")


@functools.lru_cache(maxsize=4096)
def _parsed_gold(answer: Answer) -> Any:
    return _parsed(answer) or _parse(f"${answer.text}$")


def _parsed(answer: Answer) -> Any:
    text = answer.text
    if answer.is_alone and not _is_delimited(text) and not _has_words(text):
        return _parse(formula(text) or f"${text}$") or _parse(text)
    return ((written := formula(text)) and _parse(written)) or _parse(text)


def _parse(text: str) -> Any:
    return _math_verify().parse(text, parsing_timeout=None)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _decimals(parsed: Any) -> int:
    """Decimals to which numbers are compared: six, and more where the reference is smaller than one."""
    number = parsed[0]
    if not getattr(number, "is_number", False) or not number.is_real or not -1 < number < 1 or number == 0:
        return 6
    return 6 + math.ceil(-math.log10(abs(float(number)) or 1.0))


def _digits_and_base(text: str) -> tuple[str, ...]:
    found = _IN_BASE.fullmatch(text)
    return found.groups() if found else (text,)


def ungrouped(text: str) -> str:
    """The text with numbers such as 1,234 as 1234. "1,2", "1, 234" and the point "(1,234)" stay as they are."""
    text = _LATEX_COMMA.sub(",", text)
    seen = _DELIMITER.sub("$$", text)
    return _GROUPED.sub(lambda number: number[0] if _is_in_list(seen, number) else number[0].replace(",", ""), text)


def plain(text: str) -> str:
    """The text as it is compared with another, without blanks that separate no words or digits, and without what only
    changes its looks."""
    text = re.sub(r"\\(?:left|right)\b|\\[!;: ]", "", _TEXT.sub(r"\1", text)).replace("dfrac", "frac")
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text.strip().rstrip(".").replace("$", ""))


def formula(text: str) -> str:
    """A list, an interval or a mixed number as LaTeX: the whole answer, or a list that ends a sentence. Empty where
    there is none, and for what is LaTeX already."""
    bare = _undelimited(text.strip().rstrip("."))
    if "\\boxed" in bare or _is_delimited(bare):
        return ""
    if mixed := _MIXED.fullmatch(bare):
        return f"${mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}$"
    joined = _AND.sub(", ", bare) if len(bare) <= MOST_CHARACTERS else bare
    if len(bare) > MOST_CHARACTERS or _has_words(joined):
        return _last_list(bare)
    return f"${joined}$" if "," in joined or ";" in joined or joined[:1] in tuple(_OPEN) else ""


def _is_delimited(text: str) -> bool:
    return "$" in text or _DELIMITER.search(text) is not None


def _undelimited(text: str) -> str:
    """A list whose entries are formulas of their own, as "$1$, 2" or "$1$ and $2$", without the dollars."""
    outside = _AND.sub(", ", " ".join(text.split("$")[::2]))
    is_list = "$" in text and len(text) <= MOST_CHARACTERS and text.count("$") % 2 == 0 and re.search("[,;]", outside)
    return text.replace("$", "") if is_list and not re.search("[a-zA-Z]", outside) else text


def _has_words(text: str) -> bool:
    return re.search(r"[a-zA-Z]{2}", _COMMAND.sub("", _TEXT.sub("", text))) is not None


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


def _warm_math_verify(_options: Mapping[str, Any]) -> None:
    # math-verify warns that its signal-based timeouts are off; the pool's own deadline stands in for them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify("1", "2x")


@reward("math_verify", warm=_warm_math_verify)
def math_verify(response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference mathematically, else 0.0.

    The final answer stands after `####`, in the last `\\boxed{}`, or is the last number, list or formula of the
    response. Raises `ValueError` if the reference answer itself cannot be read.
    """
    return float(are_equal(Answer.of(str(answer)), Answer.of(response)))


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
