"""The runs of a sweep, from words with several values in Hydra's grammar. Pure.

seed=1,2,3        seed=range(1,4)        trainer.optimizer.lr=1e-4,3e-4        algorithm=choice(grpo,rloo)
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.values import split

MOST = 10_000
"""Most runs of one sweep."""
OWN = ("name", "output_dir", "resume")
"""Keys that the sweep sets for each of its runs."""
SEED = "seed"


@dataclass(frozen=True)
class Point:
    name: str
    """Name of the point's run, made of what differs from the others: lr-1e-4_seed-1."""
    values: dict[str, str]
    """Values of the keys that are swept, by key."""
    words: tuple[str, ...]
    """All words that `penstock run` is given."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The point's values without the seed: points of one setting differ by chance alone."""
        return tuple((key, value) for key, value in self.values.items() if key != SEED)


def points_of(words: Sequence[str]) -> list[Point]:
    """The points of a sweep: every combination, the last word's values changing fastest. Raises `ConfigError`."""
    parser = OverridesParser.create()
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for word in words:
        values = _values(parser, word)
        key = word.partition("=")[0].strip().lstrip("+")
        if key in OWN:
            raise ConfigError(f"{word}: a sweep sets {key} of its runs itself. Its own directory is --directory DIR.")
        if values is None:
            fixed.append(word)
        elif len(set(values)) < len(values):
            raise ConfigError(f"{word}: a value is there twice.")
        else:
            swept[word.partition("=")[0].strip()] = values
    if not swept:
        raise ConfigError(
            "nothing is swept: give a key several values, like seed=1,2,3 or trainer.max_steps=range(10,40,10)."
        )
    count = math.prod(map(len, swept.values()))
    if count > MOST:
        raise ConfigError(f"the sweep has {count:,} runs; {MOST:,} are the most.")
    shown = _short([key.lstrip("+") for key in swept])
    points = []
    for chosen in itertools.product(*swept.values()):
        own = dict(zip(swept, chosen, strict=True))
        name = "_".join(f"{shown[key.lstrip('+')]}-{_plain(value)}" for key, value in own.items())
        told = tuple(f"{key}={value}" for key, value in own.items())
        points.append(Point(name, {key.lstrip("+"): value for key, value in own.items()}, (*fixed, *told)))
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        points = [Point(f"{number}_{point.name}", point.values, point.words) for number, point in enumerate(points, 1)]
    return points


def _values(parser: OverridesParser, word: str) -> list[str] | None:
    """The values of a word; None for a word of one value. Raises `ConfigError`."""
    try:
        parsed = parser.parse_override(word)
        if not parsed.is_sweep_override():
            return None
        text = word.partition("=")[2]
        listed = re.fullmatch(r"\s*choice\((.*)\)\s*", text)
        written, values = split(listed[1] if listed else text), list(parsed.sweep_string_iterator())
        return written if len(written) == len(values) else values  # a commit 2e90114 is no number, and stays as it is
    except HydraException as error:
        if re.search(r"=\s*(interval|glob)\(", word):
            raise ConfigError(f"{word}: {str(error).splitlines()[0]}. List the values, or use range(…).") from None
        return None  # text that is no literal, which `penstock run` takes as it is


def _short(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or as many parts as tell it from the others."""
    every = list(keys)
    found = {}
    for key in every:
        parts = key.split(".")
        found[key] = next(
            short for count in range(1, len(parts) + 1)
            if (short := ".".join(parts[-count:])) == key
            or sum(other == short or other.endswith(f".{short}") for other in every) == 1
        )  # fmt: skip
    return found


def _plain(value: str) -> str:
    """The value as part of a directory's name."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-.")[-40:] or "empty"
