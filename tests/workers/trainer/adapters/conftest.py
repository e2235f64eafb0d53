"""Data and trainers with a slot for adapters, on one rank."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import AdapterState, Datum
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.slot_trainer import SlotTrainer, with_slot

MAX_RANK = 8


def datum_of(random: np.random.Generator, names: tuple[str, ...] = (), width: int | None = None) -> Datum:
    """A datum of 2 to 20 tokens. `width`: targets after each token; None: one, in one dim."""
    length = int(random.integers(2, 21))
    shape = (length,) if width is None else (length, width)
    made = {
        "weights": lambda: random.integers(0, 2, shape).astype(np.float32),
        "logprobs": lambda: random.normal(-4.5, 0.3, shape).astype(np.float32),
        "advantages": lambda: random.normal(size=shape).astype(np.float32),
        "sequence_ratio_mask": lambda: random.integers(0, 2, shape).astype(np.float32),
        "clip_low_threshold": lambda: random.uniform(0.6, 0.9, shape).astype(np.float32),
        "clip_high_threshold": lambda: random.uniform(1.1, 1.4, shape).astype(np.float32),
    }
    return Datum(
        random.integers(3, 90, length).astype(np.int32),
        random.integers(3, 90, shape).astype(np.int64),
        {name: made[name]() for name in names},
    )


def data_of(seed: int, count: int = 5, names: tuple[str, ...] = ("weights",), width: int | None = None) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [datum_of(random, names, width) for _ in range(count)]


def assert_equal(ours: AdapterState | None, expected: AdapterState | None) -> None:
    """Assert that states are the same, bit for bit."""
    assert ours is not None
    assert expected is not None
    assert replace(ours, tensors={}) == replace(expected, tensors={})
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        assert ours.tensors[name].tobytes() == values.tobytes(), name


@pytest.fixture
def make_slot(model_path: str) -> Iterator[Callable[..., SlotTrainer]]:
    """`make_slot(rank=…, path=…, max_tokens_per_microbatch=…)`: options of the slot or of the config."""
    made: list[SlotTrainer] = []

    def make(rank: int = MAX_RANK, path: str = model_path, **options: Any) -> SlotTrainer:
        config = with_slot(TrainerConfig(**options), rank)
        made.append(SlotTrainer(config, path, Ranks.join(config)))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.close()
