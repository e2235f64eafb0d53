"""Demonstrations of a player that knows the rules of the game, and no way to play it well: each guess is any number
that is still possible. What is best among them is left to find out."""

import random
from collections.abc import Iterator
from typing import Any

HIGHEST, GUESSES = 15, 4


def games(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a guess: the conversation so far, and the guess."""
    draws = random.Random(seed)
    while True:
        number, low, high = draws.randint(1, HIGHEST), 1, HIGHEST
        messages = [{"role": "user", "content": f"1-{HIGHEST}?"}]
        for _ in range(GUESSES):
            guess = draws.randint(low, high)
            yield {"messages": list(messages), "guess": str(guess)}
            if guess == number:
                break
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            messages += [
                {"role": "assistant", "content": str(guess)},
                {"role": "user", "content": "higher" if guess < number else "lower"},
            ]
