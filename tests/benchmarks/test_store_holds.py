"""The benchmark runs. The seconds of calls of a store of two thousand rows are not judged."""

import asyncio
from pathlib import Path

from benchmarks import store_holds


def test_every_kind_of_call_is_measured(tmp_path: Path) -> None:
    measured = asyncio.run(store_holds.measure(2_000, tmp_path))
    assert {"cut", "snapshot", "describe", "four clients leave", "a node is lost"} <= measured.keys()
    assert all(cpu_ms >= 0 and clock_ms >= 0 for cpu_ms, clock_ms in measured.values())
