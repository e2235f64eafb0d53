"""The streaming store: the ledger alone, and the store of a run against TransferQueue, alternating on the same cores.

    make bench-env && python -m benchmarks.store --json store.json

Four cases: (a) batches of 64 rows of 512-1024 tokens, (b) of 8-16k tokens, (c) single rows, (d) as (a) with
100,000 rows resident. *Stages*: prompts in, responses and log-probabilities written, rewards written, trained and gone,
by four processes at once. `raw` is what Ray's object store does with the same batches: one process puts them while two
others read them; or one process alone puts, gets and copies them. The faster of both is the limit. Pictures are a case
of their own, without TransferQueue (`store_pictures.py`).

Both sides are started several times. *Cold* is the first round after a start: whatever memory a side takes, it touches
for the first time. *Warm* are the rounds after it. Medians, and in brackets the lowest and the highest.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Child, Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.store_pictures import FULL, QUICK, measure_pictures, picture_targets, print_pictures
from benchmarks.store_scale import measure_scale, print_scale
from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS
from penstock.store.ledger.group import Facts
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
ROWS = {"a": 4096, "b": 1024, "c": 512, "d": 2048}
"""Number of rows of a round: short ones, since what is slow at the beginning would vanish in long ones."""
IN_FLIGHT = {"a": 4, "b": 4, "c": 32, "d": 4}
"""Number of requests that each process has under way at a time, on either side. In (c) TransferQueue is as fast with
4."""
NUM_STARTS = 3
NUM_WARM = 2
SIDES = ("TransferQueue", "Penstock")
STATES = ("cold", "warm")
MEGABYTES = (
    ("MB/s: Penstock", "stages", "Penstock"), ("MB/s: raw, three processes", "raw", "Ray"),
    ("MB/s: raw, one", "alone", "Ray"),
)  # fmt: skip
Round = dict[str, Any]
TARGETS = {"a": 10.0, "b": 3.0, "c": 5.0, "d": 20.0}
"""Ratios to TransferQueue, end to end through the stages."""
RAW_SHARE = 0.5
"""Share of the raw limit, in (b)."""


def measure(case: str, work: Path, num_starts: int) -> list[Round]:
    """Measure rounds of both sides and the raw limit, alternating."""
    rounds: list[Round] = []
    for start in range(num_starts):
        sides = {
            "TransferQueue": Child("TransferQueue", "transfer_queue", work / f"tq_{case}.log", python=TQ_PYTHON),
            "Penstock": Child("Penstock", "penstock_store", work / f"penstock_{case}.log"),
        }
        try:
            for child in sides.values():
                child.ready()
            rounds += ({"start": start, **entry} for entry in ask_all(case, sides))
        finally:
            for child in sides.values():
                child.close()
    return rounds


def ask_all(case: str, sides: dict[str, Child]) -> Iterator[Round]:
    """Ask for the rounds of one start, in each the same rows on all sides."""
    stages = [*(("stages", side) for side in SIDES), ("raw", "Ray"), ("alone", "Ray")]
    rounds = [("cold", stages), *NUM_WARM * [("warm", stages)]]
    rounds += [("warm", [(op, side) for side in SIDES]) for op in ("put", "lease")]
    for seed, (state, orders) in enumerate(rounds):
        for op, side in orders:
            request = {"case": case, "op": op, "rows": ROWS[case], "in_flight": IN_FLIGHT[case], "seed": seed}
            answer = sides.get(side, sides["Penstock"]).ask({**request, **CASES[case]})
            if "error" in answer:
                print(f"({case}) {op}, {side}: {answer['error']}", flush=True)
            else:
                yield {"case": case, "op": op, "side": side, "state": state, "seed": seed, **answer}


def rates(rounds: list[Round], case: str, state: str, op: str, side: str, unit: str = "rows") -> dict[Any, float]:
    """Rates in rows (or bytes) a second, by round."""
    wanted = (case, state, op, side)
    some = [entry for entry in rounds if tuple(entry[key] for key in ("case", "state", "op", "side")) == wanted]
    return {(entry["start"], entry["seed"]): entry[unit] / entry["seconds"] for entry in some}


def over(ours: dict[Any, float], others: dict[Any, float]) -> list[float]:
    """Ratios, round by round."""
    return [ours[key] / others[key] for key in ours if key in others]


def ratios(rounds: list[Round], case: str, state: str, op: str) -> list[float]:
    return over(rates(rounds, case, state, op, "Penstock"), rates(rounds, case, state, op, "TransferQueue"))


def raw_shares(rounds: list[Round], case: str, state: str) -> list[float]:
    """Shares of the limit, round by round."""
    ours = rates(rounds, case, state, "stages", "Penstock", "bytes")
    raw, alone = (rates(rounds, case, state, op, "Ray", "bytes") for op in ("raw", "alone"))
    return over(ours, {key: max(rate, alone.get(key, 0.0)) for key, rate in raw.items()})


def spread(found: Iterable[float], digits: int = 0) -> str:
    """Format median, lowest and highest."""
    values = list(found)
    if not values:
        return "-"
    return "{:,.{d}f} ({:,.{d}f}-{:,.{d}f})".format(statistics.median(values), min(values), max(values), d=digits)


def print_rounds(rounds: list[Round], cases: list[str]) -> None:
    table = new_table(
        "Store: rows/s, cold | warm, medians (lowest-highest)", ["case", "what"], [*STATES, "ratio cold", "ratio warm"]
    )
    for case in cases:
        for op in ("stages", "put", "lease"):
            states = STATES if op == "stages" else STATES[1:]
            for side in SIDES:
                found = [rates(rounds, case, state, op, side).values() for state in states]
                words = ["", *map(spread, found)][-2:]
                if side == "Penstock":
                    words += ["", *(spread(ratios(rounds, case, state, op), 1) for state in states)][-2:]
                table.add_row(f"({case})", f"{op}, {side}", *words)
        megabytes = {
            name: [spread(v / 1e6 for v in rates(rounds, case, s, op, side, "bytes").values()) for s in STATES]
            for name, op, side in MEGABYTES
        }
        for name, words in megabytes.items():
            table.add_row(f"({case})", name, *words)
        words = ["", "", *(spread(raw_shares(rounds, case, state), 2) for state in STATES)]
        table.add_row(f"({case})", "Penstock, of the faster raw", *words, end_section=True)
    show(table, 150)


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
    """Drive `num_rounds` batches through all stages, with as many groups resident at the end as at the start. Returns
    the transitions of a row by a stage."""
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
        ledger.served(number + 1)
    return num_rounds * 64 * len(spec.stages)


def _first(facts: Facts, count: int) -> Facts:
    if count == len(facts.row_bytes):
        return facts
    cut = [None if values is None else values[:count] for values in (facts.oldest_version, facts.response_tokens)]
    lengths = None if facts.token_lengths is None else facts.token_lengths[:count]
    return Facts(facts.row_bytes[:count], cut[0], cut[1], None, facts.token_column, lengths)


def measure_ledger(resident_rows: int, quick: bool) -> dict[str, float]:
    """Measure transitions a second of CPU time, latency of decisions with rows resident, and their control state."""
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


def targets_of(rounds: list[Round], cases: list[str], ledger: dict[str, float]) -> list[Target]:
    targets = []
    for case in cases:
        for state in STATES:
            ratio = statistics.median(ratios(rounds, case, state, "stages") or [0.0])
            name = f"({case}) through the stages, over TransferQueue's, {state}"
            targets.append(Target(name, ratio, "x", ">=", TARGETS[case]))
            if case == "b":
                share = statistics.median(raw_shares(rounds, case, state) or [0.0])
                targets.append(Target(f"(b) through the stages, of the raw limit, {state}", share, "", ">=", RAW_SHARE))
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
    rounds: list[Round] = []
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_STARTS
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for case in cases:
            rounds += measure(case, Path(folder), num_rounds)
        scale = measure_scale(Path(folder), num_rounds, arguments.quick)
    print_rounds(rounds, cases)
    print_scale(scale)
    pictures = measure_pictures(*(QUICK if arguments.quick else FULL))
    print_pictures(pictures)
    targets = targets_of(rounds, cases, ledger) + picture_targets(pictures)
    print_targets(targets)
    plain = [[{**entry, "latencies_ms": []} for entry in some] for some in (rounds, scale)]
    write_json(arguments.json, "store", plain[0], targets, ledger=ledger, scale=plain[1], pictures=pictures)


if __name__ == "__main__":
    main()
