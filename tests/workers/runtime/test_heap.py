"""Free memory of the heap goes back to the system, and only where it is worth it."""

import random

from penstock.workers.runtime.heap import GROWTH, GROWTH_BYTES, Heap, resident_bytes


def test_what_is_freed_between_blocks_in_use_goes_back_to_the_system() -> None:
    draws = random.Random(0)
    blocks = [bytearray(draws.randrange(50_000, 110_000)) for _ in range(4000)]
    full, freed = resident_bytes(), sum(map(len, blocks))
    blocks = blocks[::40]  # one is left in each few MiB
    assert resident_bytes() > full - freed / 4, "nothing would have to be trimmed"
    assert Heap().trim()
    assert resident_bytes() < full - freed * 0.8
    assert len(blocks) == 100


def test_it_trims_once_the_process_has_grown_by_much() -> None:
    held = [0]
    heap = Heap(lambda: held[0])
    draws, last, trims = random.Random(0), 0, 0
    for _ in range(200):
        held[0] += draws.randrange(2**27)
        may_wait = held[0] <= max(last * GROWTH, last + GROWTH_BYTES)
        did = heap.trim()
        assert not (did and may_wait and trims)
        if did:
            last, trims = held[0], trims + 1
    assert 3 < trims < 20
    assert resident_bytes() > 2**20
