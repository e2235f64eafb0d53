"""Small functions to write, each with tests: a task in words, and the results for some numbers."""

import random
from collections.abc import Callable, Iterator
from typing import Any

WORDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, n: x + n),
    "minus": ("-", lambda x, n: x - n),
    "times": ("*", lambda x, n: x * n),
}
INPUTS = (0, 1, 2, 7, -3)


def draw(draws: random.Random) -> tuple[str, int, str, int]:
    """Draw two steps: a word and a number each."""
    first, second = draws.choice(list(WORDS)), draws.choice(list(WORDS))
    return first, draws.randint(2, 9), second, draws.randint(2, 9)


def question_of(steps: tuple[str, int, str, int]) -> str:
    first, a, second, b = steps
    return f"x {first} {a}, then {second} {b}"


def code_of(steps: tuple[str, int, str, int]) -> str:
    first, a, second, b = steps
    return f"f=lambda x:(x{WORDS[first][0]}{a}){WORDS[second][0]}{b}"


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    while True:
        steps = draw(draws)
        first, a, second, b = steps
        tests = [{"input": [x], "output": WORDS[second][1](WORDS[first][1](x, a), b)} for x in INPUTS]
        yield {"question": question_of(steps), "function": "f", "tests": tests}
