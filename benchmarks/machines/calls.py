"""Calls of a client on one machine to the store on another: over the store's connection, and as Ray's actor calls."""

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Child, Target, new_table, show
from tests.machines.cluster import machines

WAYS = {"connection": "the store's connection", "ray": "Ray's actor calls"}
IN_FLIGHT = (1, 32)
"""Calls of a client at a time: one that waits for each, and one that has much to do."""
TIMES_FASTER = 5.0
NUM_ROUNDS, SECONDS = 5, 2.0


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    with TemporaryDirectory(prefix="penstock-bench-") as folder, machines(2) as cluster:
        address = cluster.start_ray()
        child = Child("calls", "store_calls", Path(folder) / "calls.log", [address], sys.executable, cluster[1].start)
        return _rounds(child, 1 if quick else num_rounds or NUM_ROUNDS, 0.5 if quick else SECONDS)


def _rounds(child: Child, num_rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure rounds of both ways, alternating."""
    rounds = []
    try:
        child.ready()
        for number in range(num_rounds):
            for in_flight in IN_FLIGHT:
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    request = {"way": way, "in_flight": in_flight, "seconds": seconds}
                    answer = child.ask(request)
                    latencies = sorted(answer.pop("latencies_ms"))
                    p50, p99 = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))]
                    rounds.append({**request, **answer, "p50_ms": p50, "p99_ms": p99, "round": number})
    finally:
        child.close()
    return rounds


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"calls: a second, of a client {in_flight} at a time, beside Ray's",
            calls_a_second(rounds, "connection", in_flight) / calls_a_second(rounds, "ray", in_flight),
            "x",
            ">=",
            TIMES_FASTER,
        )
        for in_flight in IN_FLIGHT
    ]


def calls_a_second(rounds: list[dict[str, Any]], way: str, in_flight: int) -> float:
    return statistics.median(entry["calls"] / entry["seconds"] for entry in _of(rounds, way, in_flight))


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("Calls of a remote client", ["way"], ["at a time", "calls/s", "p50 / p99 ms"])
    for in_flight in IN_FLIGHT:
        for way, name in WAYS.items():
            some = _of(rounds, way, in_flight)
            p50, p99 = (statistics.median(entry[key] for entry in some) for key in ("p50_ms", "p99_ms"))
            rate = calls_a_second(rounds, way, in_flight)
            table.add_row(name, str(in_flight), f"{rate:,.0f}", f"{p50:.2f} / {p99:.2f}")
    show(table)


def _of(rounds: list[dict[str, Any]], way: str, in_flight: int) -> list[dict[str, Any]]:
    return [entry for entry in rounds if (entry["way"], entry["in_flight"]) == (way, in_flight)]
