"""Demonstrations of a player that knows the coins, and pays with any of them."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.tree.coins import COINS, NUM_COINS, draw, paid


def payments(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a coin: the conversation so far, and the coin."""
    draws = random.Random(seed)
    while True:
        left = draw(draws)
        messages = [{"role": "user", "content": str(left)}]
        for _ in range(NUM_COINS):
            coin = str(draws.choice(COINS))
            yield {"messages": list(messages), "coin": coin}
            left = paid(left, coin)
            messages += [{"role": "assistant", "content": coin}, {"role": "user", "content": str(left)}]
