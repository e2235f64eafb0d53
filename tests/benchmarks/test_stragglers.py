"""The benchmark runs, and the second engine is asked. The figures of two steps are not judged."""

import asyncio

from benchmarks import stragglers


def test_a_slow_engine_loses_groups_to_the_others() -> None:
    found = asyncio.run(stragglers.run(3.0, stragglers.SLOW, num_steps=2, first_prompt=0))
    assert len(found["seconds"]) == 2
    assert found["offered"] >= found["won"] > 0
    assert found["twice_groups"] > 0
