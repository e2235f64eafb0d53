"""Lengths of responses: those that a run has recorded, or a lognormal distribution that is cut at a cap.

Most responses of reinforcement learning are short and a few run into the cap: a lognormal with sigma 0.5 to 1 has both.

A response of an environment is an attempt of several turns. Between them the environment adds tokens and takes time,
both in proportion to the attempt's length:

    prompt ─▶ turn ─▶ tools: added tokens, wait_s ─▶ turn ─▶ …      the engine reads what is added, and with `reread`
                                                                   a share of what it had read and made before
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import xxhash

SIGMA = 0.6
"""Default spread of the logarithm: between short answers (0.3) and long chains of thought (0.9)."""
POINTS = 256
"""Number of quantiles that stand for a distribution."""


@dataclass(frozen=True)
class Turns:
    """The turns of an attempt in the mean."""

    count: float = 1.0
    added: float = 0.0
    """Tokens that the environment adds before each further turn."""
    wait_s: float = 0.0
    """Seconds before each further turn in which the policy samples nothing: tools, users."""
    reread: float = 0.0
    """Share of the conversation so far that an engine reads again for a further turn: 0 with its prefix cache, 1
    without."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of response tokens, by its quantiles."""

    quantiles: tuple[int, ...]
    """Lengths at the middle of equal shares, ascending: tokens that are sampled."""
    prompt: int = 100
    """Mean tokens of a prompt."""
    turns: Turns = Turns()

    @classmethod
    def lognormal(cls, mean: float, cap: int, sigma: float = SIGMA, prompt: int = 100) -> "Lengths":
        """A lognormal that is cut at `cap`, with this mean after the cut."""
        if mean >= cap:
            return cls((cap,) * POINTS, prompt)
        low, high = -4 * sigma - sigma**2, math.log(cap) + 4 * sigma
        for _ in range(60):  # the mean of what is cut grows with the median
            middle = (low + high) / 2
            if _mean(_cut(middle, sigma, cap)) < mean:
                low = middle
            else:
                high = middle
        return cls(tuple(_cut(high, sigma, cap)), prompt)

    @classmethod
    def recorded(cls, lengths: Sequence[int], prompt: int, turns: Turns = Turns()) -> "Lengths":
        """Those of a run, in any order."""
        ordered = sorted(lengths)
        step = len(ordered) / POINTS
        return cls(tuple(ordered[int((index + 0.5) * step)] for index in range(POINTS)), prompt, turns)

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return _mean(self.quantiles)

    @cached_property
    def growth(self) -> float:
        """Tokens of a response with those that an environment adds to it, by those that are sampled."""
        return 1 + (self.turns.count - 1) * self.turns.added / self.mean if self.mean else 1.0

    @cached_property
    def waits_s(self) -> float:
        """Mean seconds of an attempt between its turns."""
        return (self.turns.count - 1) * self.turns.wait_s

    @cached_property
    def read(self) -> float:
        """Mean tokens of an attempt that an engine reads after its prompt."""
        turns = self.turns
        before = self.prompt + (self.mean + (turns.count - 2) * turns.added) / 2
        return (turns.count - 1) * (turns.added + turns.reread * before)

    def row_tokens(self, length: float) -> float:
        """Tokens of a row whose response has `length`."""
        return self.prompt + length * self.growth

    @cached_property
    def mean_context(self) -> float:
        """Mean tokens before a token that is decoded, over all that are: long responses have more of them."""
        squares = sum(length * length for length in self.quantiles) / len(self.quantiles)
        return self.prompt + self.growth * squares / (2 * self.mean) if self.mean else float(self.prompt)

    @cached_property
    def residuals(self) -> list[int]:
        """Tokens that sequences still have to make, seen at a random moment of an engine that is always full,
        ascending: long sequences are met more often, anywhere in their course."""
        found = [round(length * (index + 0.5) / 4) for length in self.sample(24) for index in range(4)]
        weights = [length for length in self.sample(24) for _ in range(4)]
        whole, seen, chosen = sum(weights), 0.0, list[int]()
        for value, weight in sorted(zip(found, weights, strict=True)):
            seen += weight
            while len(chosen) < 24 and seen / whole >= (len(chosen) + 0.5) / 24:
                chosen.append(max(1, value))
        return chosen

    def of(self, group: int, sample: int, seed: int = 0) -> int:
        """The length of one sample: the same whenever it is asked for."""
        number = xxhash.xxh64_intdigest(f"{seed}/{group}/{sample}".encode())
        return self.quantiles[number % len(self.quantiles)]

    def longest(self, count: int) -> int:
        """The last of `sample(count)`."""
        return self.quantiles[int((count - 0.5) * len(self.quantiles) / count)]

    def sample(self, count: int) -> list[int]:
        """So many lengths that stand for the distribution, ascending."""
        return [self.quantiles[int((index + 0.5) * len(self.quantiles) / count)] for index in range(count)]


def _cut(mu: float, sigma: float, cap: int) -> list[int]:
    normal = NormalDist(mu, sigma) if sigma else None
    values = [math.exp(normal.inv_cdf((index + 0.5) / POINTS) if normal else mu) for index in range(POINTS)]
    return [max(1, min(cap, round(value))) for value in values]


def _mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / len(lengths)
