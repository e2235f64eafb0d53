"""Control of a remote client: calls a second over the store's connection and by Ray's actor calls.

    python -m benchmarks.store_calls --json FILE        both on this machine: what protocols cost, without a link

Part "calls" of `benchmarks/machines.py`, which measures the same between two machines.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Child, Target, new_table, parse_arguments, print_targets, show, write_json

WAYS = {"connection": "the store's connection", "ray": "Ray's actor calls"}
IN_FLIGHT = (1, 32)
"""Calls of a client at a time: one that waits for each, and one that has much to do."""
TIMES_FASTER = 5.0


def measure_calls(work: Path, num_rounds: int, seconds: float, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rounds of both ways, alternating. `arguments`: of `peers/store_calls.py`."""
    child = Child("calls", "store_calls", work / "calls.log", arguments)
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


def targets_of_calls(rounds: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"calls a second of a remote client, {in_flight} at a time, beside Ray's",
            calls_a_second(rounds, "connection", in_flight) / calls_a_second(rounds, "ray", in_flight),
            "x",
            ">=",
            TIMES_FASTER,
        )
        for in_flight in IN_FLIGHT
    ]


def calls_a_second(rounds: list[dict[str, Any]], way: str, in_flight: int) -> float:
    return statistics.median(entry["calls"] / entry["seconds"] for entry in _of(rounds, way, in_flight))


def print_calls(rounds: list[dict[str, Any]]) -> None:
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


def main() -> None:
    arguments = parse_arguments(__doc__)
    with tempfile.TemporaryDirectory() as work:
        rounds = measure_calls(
            Path(work), arguments.rounds or (2 if arguments.quick else 7), 1 if arguments.quick else 3
        )
    targets = targets_of_calls(rounds)
    print_calls(rounds)
    print_targets(targets)
    write_json(arguments.json, "store_calls", rounds, targets)


if __name__ == "__main__":
    main()
