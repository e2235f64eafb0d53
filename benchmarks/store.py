"""The streaming store: the ledger alone, and the store of a run against TransferQueue, alternating on the same cores.

    make bench-env && python -m benchmarks.store --json store.json

Four cases: (a) batches of 64 rows of 512-1024 tokens, (b) of 8-16k tokens, (c) single rows, (d) as (a) with
100,000 rows resident. Three operations: put, lease and read, and *stages*: prompts in, responses and log-probabilities
written, rewards written, trained and gone, by four processes at once. Medians over rounds. `raw` is what Ray's object
store does with the same batches: put, get, and one copy.
"""

import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Child, Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.store_scale import measure_scale, print_scale
from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS
from penstock.store.ledger.facts import Facts
from penstock.store.ledger.ledger import Ledger
from penstock.store.spec import StageSpec, StoreSpec

TQ_PYTHON = ROOT / ".venv-tq" / "bin" / "python"
SHORT = {"batch": 64, "min_tokens": 512, "max_tokens": 1024, "resident": 0}
CASES: dict[str, dict[str, int]] = {
    "a": SHORT,
    "b": {"batch": 64, "min_tokens": 8192, "max_tokens": 16384, "resident": 0},
    "c": {**SHORT, "batch": 1},
    "d": {**SHORT, "resident": 100_000},
}
ROWS = {"a": 16384, "b": 8192, "c": 512, "d": 8192}
"""Of a round: half a second of the faster side. Rounds of 0.15 s and less differed by two thirds, and in (b) half of
the pages of 1,024 rows are touched for the first time, which a run does only once."""
OPS = ("put", "lease", "stages")
NUM_ROUNDS = 3
TARGETS = {"a": 10.0, "b": 3.0, "c": 5.0, "d": 20.0}
"""Times TransferQueue, end to end through the stages."""
RAW_SHARE = 0.5
"""Of the raw limit, in (b)."""


def measure(case: str, work: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Rounds of both sides and the raw limit; the first round of each is not counted."""
    sides = {
        "TransferQueue": Child("TransferQueue", "transfer_queue", work / f"tq_{case}.log", python=TQ_PYTHON),
        "Penstock": Child("Penstock", "penstock_store", work / f"penstock_{case}.log"),
    }
    rounds = []
    try:
        for child in sides.values():
            child.ready()
        for number in range(-1, num_rounds):
            for op in OPS:
                for side, child in sides.items():
                    answer = child.ask({"case": case, "op": op, "rows": ROWS[case], "seed": number + 1, **CASES[case]})
                    if "error" in answer:
                        print(f"({case}) {op}, {side}: {answer['error']}", flush=True)
                    elif number >= 0:
                        rounds.append({"case": case, "op": op, "side": side, "round": number, **answer})
            answer = sides["Penstock"].ask({"op": "raw", "rows": ROWS[case], "seed": number + 1, **CASES[case]})
            if number >= 0:
                rounds.append({"case": case, "op": "raw", "side": "Ray", "round": number, **answer})
    finally:
        for child in sides.values():
            child.close()
    return rounds


def chosen(rounds: list[dict[str, Any]], case: str, op: str, side: str) -> list[dict[str, Any]]:
    return [entry for entry in rounds if (entry["case"], entry["op"], entry["side"]) == (case, op, side)]


def rate(rounds: list[dict[str, Any]], case: str, op: str, side: str, unit: str = "rows") -> float:
    """Median rows (or bytes) a second; 0 if no round succeeded."""
    entries = chosen(rounds, case, op, side)
    return statistics.median(entry[unit] / entry["seconds"] for entry in entries) if entries else 0.0


def latency(rounds: list[dict[str, Any]], case: str, op: str, side: str) -> str:
    values = sorted(value for entry in chosen(rounds, case, op, side) for value in entry["latencies_ms"])
    return f"{values[len(values) // 2]:.1f} / {values[int(0.99 * len(values))]:.1f}" if values else ""


def print_rounds(rounds: list[dict[str, Any]], cases: list[str]) -> None:
    table = new_table(
        "Store: medians over rounds",
        ["case", "operation", "side"],
        ["rows/s", "MB/s", "p50 / p99 ms", "x TransferQueue"],
    )
    for case in cases:
        for op, side in [(op, side) for op in OPS for side in ("TransferQueue", "Penstock")] + [("raw", "Ray")]:
            rows, peer = rate(rounds, case, op, side), rate(rounds, case, op, "TransferQueue")
            ratio = f"{rows / peer:.1f}" if peer and side == "Penstock" else ""
            megabytes = rate(rounds, case, op, side, "bytes") / 1e6
            table.add_row(case, op, side, f"{rows:,.0f}", f"{megabytes:,.1f}", latency(rounds, case, op, side), ratio)
    show(table, 110)


# The ledger alone.


def ledger_spec(group_size: int) -> StoreSpec:
    stages = (
        StageSpec("rollout", "group", ("prompt_ids",), ROLLOUT_COLUMNS),
        StageSpec("reward", "sample", ("response_text",), ("reward",)),
        StageSpec("advantage", "group", ("reward",), ("advantage",)),
        StageSpec("train", "batch", ("response_ids", "advantage"), ()),
    )
    return StoreSpec(
        tuple(STANDARD_COLUMNS.values()), PROMPT_COLUMNS, stages, group_size, 64 // group_size, 10**9, 10**9,
        max_bytes=2**60,
    )  # fmt: skip


def drive(ledger: Ledger, num_rounds: int, latencies: list[float]) -> int:
    """`num_rounds` batches through all stages, with as many groups resident at the end as at the start; transitions of
    a row by a stage."""
    spec, clock = ledger.spec, time.perf_counter
    facts = {
        "rollout": Facts([64] * 64, [0] * 64, [8] * 64, None, "response_ids", [8] * 64),
        "reward": Facts([4] * 64),
        "advantage": Facts([4] * 64),
    }
    first = ledger.rounds.formed
    for number in range(first, first + num_rounds):
        for _ in range(spec.groups_per_step):
            ledger.admit(0.0, 64, 8)
        for stage in spec.stages[:-1]:
            left = 64
            while left:
                start = clock()
                lease = ledger.lease(
                    stage.name, 8 if stage.unit == "sample" else max(1, 8 // spec.group_size), "w", 0.0
                )
                leased = clock()
                assert lease is not None
                rows = ledger.rows_of(lease)
                some = _first(facts[stage.name], len(rows))
                asked = clock()
                ledger.write(lease.id, stage.name, rows, stage.writes, some, 0.0)
                latencies += (leased - start, clock() - asked)
                left -= len(rows)
        start = clock()
        made, _ = ledger.lease_shared("train", number, 1, 1, "trainer", 0.0)
        latencies.append(clock() - start)
        assert made is not None
        ledger.complete_shared(made.lease_id, 0)
        ledger.published(number + 1)
    return num_rounds * 64 * len(spec.stages)


def _first(facts: Facts, count: int) -> Facts:
    if count == len(facts.row_bytes):
        return facts
    cut = [None if values is None else values[:count] for values in (facts.oldest_version, facts.response_tokens)]
    lengths = None if facts.token_lengths is None else facts.token_lengths[:count]
    return Facts(facts.row_bytes[:count], cut[0], cut[1], None, facts.token_column, lengths)


def measure_ledger(resident_rows: int, quick: bool) -> dict[str, float]:
    """Transitions a second of CPU time, latency of decisions with rows resident, and their control state."""
    ledger = Ledger(ledger_spec(8))
    drive(ledger, 20, [])
    start = time.process_time()
    moves = drive(ledger, 50 if quick else 400, [])
    seconds = time.process_time() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(resident_rows // 8):
        ledger.admit(0.0, 64, 8)
    state = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    latencies: list[float] = []
    drive(ledger, 20 if quick else 100, latencies)
    latencies.sort()
    return {
        "transitions_per_s": moves / seconds,
        "bytes_per_row": state / resident_rows,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
        "resident_rows": resident_rows,
    }


def targets_of(rounds: list[dict[str, Any]], cases: list[str], ledger: dict[str, float]) -> list[Target]:
    targets = []
    for case in cases:
        peer = rate(rounds, case, "stages", "TransferQueue")
        ratio = rate(rounds, case, "stages", "Penstock") / peer if peer else 0.0
        targets.append(Target(f"({case}) through the stages, over TransferQueue's", ratio, "x", ">=", TARGETS[case]))
    if "b" in cases:
        share = rate(rounds, "b", "stages", "Penstock", "bytes") / rate(rounds, "b", "raw", "Ray", "bytes")
        targets.append(Target("(b) through the stages, of the raw limit", share, "", ">=", RAW_SHARE))
    resident = f"{ledger['resident_rows']:,.0f} rows resident"
    return [
        *targets,
        Target("ledger: row-stage transitions", ledger["transitions_per_s"], "/s", ">=", 200_000),
        Target("ledger: control state a row", ledger["bytes_per_row"], "bytes", "<=", 300),
        Target(f"ledger: p99 of a decision, {resident}", ledger["p99_ms"], "ms", "<=", 1.0),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    if not TQ_PYTHON.exists():
        raise SystemExit("There is no .venv-tq: run `make bench-env` first.")
    cases = ["a", "c"] if arguments.quick else list(CASES)
    ledger = measure_ledger(100_000 if arguments.quick else 1_000_000, arguments.quick)
    rounds: list[dict[str, Any]] = []
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for case in cases:
            rounds += measure(case, Path(folder), num_rounds)
        scale = measure_scale(Path(folder), num_rounds, arguments.quick)
    print_rounds(rounds, cases)
    print_scale(scale)
    targets = targets_of(rounds, cases, ledger)
    print_targets(targets)
    plain = [[{**entry, "latencies_ms": []} for entry in some] for some in (rounds, scale)]
    write_json(arguments.json, "store", plain[0], targets, ledger=ledger, scale=plain[1])


if __name__ == "__main__":
    main()
