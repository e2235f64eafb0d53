"""A difference and its base make the chunk again, bit for bit; what is none is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.weights.chain.difference import HEADER, apply, difference

WORDS = st.integers(0, 2**16 - 1)


def made_of(base: np.ndarray, chunk: np.ndarray) -> bytes | None:
    return difference(memoryview(base.tobytes()), memoryview(chunk.tobytes()))


def applied(made: bytes, base: np.ndarray) -> bytes:
    target = bytearray(base.nbytes)
    apply(made, memoryview(base.tobytes()), memoryview(target))
    return bytes(target)


@given(
    st.integers(64, 5000), st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 4999), WORDS), max_size=12),
)  # fmt: skip
def test_base_and_difference_make_the_chunk_bit_for_bit(count: int, seed: int, changed: list[tuple[int, int]]) -> None:
    base = np.random.default_rng(seed).integers(0, 2**16, count + count % 2, dtype=np.uint16)
    chunk = base.copy()
    for place, word in changed:
        chunk[place % count] = word
    made = made_of(base, chunk)
    if made is not None:
        assert len(made) < chunk.nbytes
        assert applied(made, base) == chunk.tobytes()
    else:
        assert len(changed) > count // 40


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 510, 511, 70_000])
def test_gaps_of_every_length_come_back(gap: int) -> None:
    base = np.zeros(160_000, np.uint16)
    chunk = base.copy()
    chunk[[6, 8 + 2 * gap]] = 65_535, 1
    made = made_of(base, chunk)
    assert made is not None
    assert applied(made, base) == chunk.tobytes()


def test_a_step_of_small_learning_rate_is_a_few_percent() -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 2**20, dtype=np.uint16)
    chunk = base + np.where(random.random(2**20) < 0.042, random.choice([1, 65_535], 2**20), 0).astype(np.uint16)
    made = made_of(base, chunk)
    assert made is not None
    assert len(made) < 0.03 * chunk.nbytes
    assert applied(made, base) == chunk.tobytes()


def test_equal_chunks_differ_by_a_header() -> None:
    base = np.arange(100, dtype=np.uint16)
    assert made_of(base, base) == HEADER.pack(0, 0)
    assert applied(HEADER.pack(0, 0), base) == base.tobytes()


def test_a_chunk_that_is_all_new_or_has_an_odd_size_has_no_difference() -> None:
    random = np.random.default_rng(0)
    one, other = (random.integers(0, 2**16, 1000, dtype=np.uint16) for _ in range(2))
    assert made_of(one, other) is None
    assert difference(memoryview(bytes(6)), memoryview(bytes(6))) is None


@given(st.binary(min_size=8, max_size=60), st.integers(0, 2**32 - 1))
def test_bytes_that_are_none_raise_or_make_another_chunk(data: bytes, seed: int) -> None:
    base = np.random.default_rng(seed).integers(0, 2**16, 200, dtype=np.uint16)
    made = made_of(base, base + (np.arange(200) % 9 == 0).astype(np.uint16))
    assert made is not None
    for damaged in (data, made[:8] + data, made[: len(made) // 2], HEADER.pack(7, 9) + data, HEADER.pack(300, 0)):
        try:
            applied(damaged, base)
        except ValueError:
            continue
