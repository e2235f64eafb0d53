"""Rows between machines: the store on 1, a producer on 2, and a reader on 3 (*far*) or on 2 as well (*near*).

Batches stay where they are written, so what a far reader pulls goes over its own link and the producer's; the store's
has the calls alone. The links' rate is one that the cores which all machines share can fill.
"""

import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Child, Target, new_table, show
from tests.machines.cluster import Cluster, machines

RATE, RATE_BYTES = "200mbit", 25e6
TOKENS, BATCH = 4096, 128
"""Tokens of a row and rows of a batch: 2 MiB a batch."""
ROWS = {True: 16 * BATCH, False: 64 * BATCH}
"""Number of rows if quick, and if not."""
NUM_ROUNDS = 3
READERS = {"far": 3, "near": 2}
"""Machine of each reader, by name."""


class Processes:
    """The store, the producer and a reader on each side. Lifecycle: a context; `send` any number of times."""

    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self._cluster = cluster
        numbers = {"store": 1, "producer": 2, **READERS}
        self._children = {name: self._child(name, number, logs) for name, number in numbers.items()}
        facts = {name: child.ready()["facts"] for name, child in self._children.items()}
        nodes = {"2": facts["producer"], "3": facts["far"]}
        endpoint = self._children["store"].ask({"op": "open_store", "nodes": nodes})["endpoint"]
        for name, number in numbers.items():
            if name != "store":
                request = {"op": "connect", "endpoint": endpoint, "nodes": nodes, "node": str(number)}
                self._children[name].ask(request)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.close()

    def send(self, reader: str, num_rows: int) -> dict[str, Any]:
        """Send so many rows from the producer to a reader, both at work at once. Returns bytes of each link, the larger
        way."""
        before = [machine.link_bytes() for machine in self._cluster]
        put = {"op": "put", "rows": num_rows, "batch": BATCH, "tokens": TOKENS}
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(self._children[reader].ask, {"op": "read", "rows": num_rows, "batch": BATCH})
            threads.submit(self._children["producer"].ask, put).result()
            answer = reading.result()
        after = [machine.link_bytes() for machine in self._cluster]
        links = [max(now - then for now, then in zip(*pair, strict=True)) for pair in zip(after, before, strict=True)]
        return {"reader": reader, **answer, "link_bytes": links}

    def _child(self, name: str, number: int, logs: Path) -> Child:
        machine = self._cluster[number]
        arguments = ["--number", str(number), "--host", machine.address]
        return Child(name, "rows_node", logs / f"rows_{name}.log", arguments, sys.executable, machine.start)


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    with (
        TemporaryDirectory(prefix="penstock-bench-") as folder,
        machines(3, rate=RATE) as cluster,
        Processes(cluster, Path(folder)) as processes,
    ):
        rounds = []
        for reader in READERS:
            processes.send(reader, 4 * BATCH)  # into pages that were never touched
            for _ in range(1 if quick else num_rounds or NUM_ROUNDS):
                rounds.append(processes.send(reader, ROWS[quick]) | {"rate": RATE})
        return rounds


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['bytes'] / 1e6:,.0f} MB of rows from machine 2, the store on 1, links of {RATE} each way; medians",
        ["reader"], ["MB/s", "of the rate", "store's link, of the payload", "most over a link, of the payload"],
    )  # fmt: skip
    for reader in READERS:
        figures = _figures(rounds, reader)
        words = [f"{figures['rate'] * RATE_BYTES / 1e6:.1f}", f"{figures['rate']:.2f}x"]
        table.add_row(reader, *words, f"{figures['store']:.2%}", f"{figures['most']:.2%}")
    show(table, 110)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    far, near = _figures(rounds, "far"), _figures(rounds, "near")
    return [
        Target("rows: a far reader's bytes a second, of its link's", far["rate"], "x", ">=", 0.8),
        Target("rows: over the store's own link, of the payload", far["store"], "x", "<=", 0.05),
        Target("rows: most over a link for a near reader, of the payload", near["most"], "x", "<=", 0.05),
    ]


def _figures(rounds: list[dict[str, Any]], reader: str) -> dict[str, float]:
    chosen = [one for one in rounds if one["reader"] == reader]
    return {
        "rate": statistics.median(one["bytes"] / one["seconds"] for one in chosen) / RATE_BYTES,
        "store": max(one["link_bytes"][0] / one["bytes"] for one in chosen),
        "most": max(max(one["link_bytes"]) / one["bytes"] for one in chosen),
    }
