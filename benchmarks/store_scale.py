"""The store at scale, part of `benchmarks.store`: 1,024 consumers, and three times more rows than its shared memory
holds."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import Child, new_table, show

CONTROL = {"op": "control", "consumers": 1024, "seconds": 5, "rows": 65_536}
SPILL = {"op": "spill", "memory_mib": 64, "times": 3, "rows_mib": 4}
"""A request for rows of three times the shared memory."""
FITTING = {**SPILL, "memory_mib": 512, "times": 0.375}
"""A request for the same rows with room for all."""


def measure_scale(work: Path, num_rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Measure rounds of both, alternating."""
    child = Child("Penstock", "penstock_scale", work / "scale.log")
    control = {**CONTROL, "consumers": 64, "seconds": 2, "rows": 16_384} if quick else CONTROL
    rounds = []
    try:
        child.ready()
        for number in range(num_rounds):
            for request in (control, SPILL, FITTING):
                answer = child.ask(request)
                if "error" in answer:
                    raise SystemExit(f"{request}: {answer['error']}")
                rounds.append({**request, **answer, "round": number})
    finally:
        child.close()
    return rounds


def print_scale(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['consumers']:,} consumers: lease a row, write a number",
        [],
        ["rows/s", "p50 / p99 ms", "of a core, the store's process"],
    )
    some = [entry for entry in rounds if entry["op"] == "control"]
    rate = statistics.median(entry["rows"] / entry["seconds"] for entry in some)
    latencies = sorted(value for entry in some for value in entry["latencies_ms"])
    share = statistics.median(entry["cpu_share"] for entry in some)
    p50, p99 = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))]
    table.add_row(f"{rate:,.0f}", f"{p50:.0f} / {p99:.0f}", f"{share:.2f}")
    show(table)
    table = new_table(
        f"{SPILL['times'] * SPILL['memory_mib']} MiB of rows, put, then read and checked",
        [],
        ["shared memory", "on disk", "put MB/s", "read MB/s"],
    )
    for request in (SPILL, FITTING):
        some = [e for e in rounds if e["op"] == "spill" and e["memory_mib"] == request["memory_mib"]]
        put, read = (statistics.median(e["bytes"] / e[key] / 1e6 for e in some) for key in ("put_s", "read_s"))
        on_disk = f"{some[0]['spilled_bytes'] / 2**20:,.0f} MiB"
        table.add_row(f"{request['memory_mib']} MiB", on_disk, f"{put:,.0f}", f"{read:,.0f}")
    show(table)
