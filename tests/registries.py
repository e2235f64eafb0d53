"""Names that a test registers, gone when it ends: other tests list what is registered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.catalogue import ALGORITHMS
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import SURROGATES

REGISTRIES: tuple[dict[str, Any], ...] = (ALGORITHMS, ADVANTAGES, SURROGATES, CORRECTIONS)


@contextmanager
def names_for_a_test() -> Iterator[None]:
    before = [set(names) for names in REGISTRIES]
    yield
    for names, known in zip(REGISTRIES, before, strict=True):
        for name in names.keys() - known:
            del names[name]
