"""What a relay takes to bring weights to another node: processor time a GB, and the rate, by the number of lanes.

    python -m benchmarks.relay --json relay.json

Two relays on this machine, over loopback: one has a whole version already, the other receives, checks and keeps it. Its
pages are warm, as from a run's third version on. Numbers of lanes take turns. Both relays share this machine's cores,
so the rate is at most that of all cores over the processor time of both; on nodes of their own each has all of its.
"""

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.harness import (
    Child,
    Target,
    memory_folder,
    new_table,
    parse_arguments,
    print_targets,
    show,
    spread,
    write_json,
)
from penstock.workers.weights.chain.plan import ChunkPlan, make_plan
from penstock.workers.weights.publication.layout import RANGE_BYTES, compute_layout

LANES = (1, 2, 4)
NUM_TENSORS, ELEMENTS = 64, RANGE_BYTES // 2
"""A GiB of bfloat16."""
QUICK_TENSORS = 20
NUM_ROUNDS, WARM = 7, 2


class Pair:
    """Two relays, of which the second receives over so many lanes. Lifecycle: a context; `send`, a version a time."""

    def __init__(self, lanes: int, plan: ChunkPlan, folder: Path, root: Path) -> None:
        self._version = 0
        self._children: list[Child] = []
        for name in ("source", "receiver"):
            arguments = ["--name", name, "--host", "127.0.0.1", "--root", str(root / f"{name}-{lanes}")]
            arguments += ["--lanes", str(lanes)]
            log = folder / f"{name}_{lanes}.log"
            self._children.append(Child(name, "relay_node", log, arguments, sys.executable))
        self._addresses = dict(
            zip(("source", "receiver"), (child.ready()["address"] for child in self._children), strict=True)
        )
        for child in self._children:
            child.ask({"op": "plan", "plan": msgspec.json.encode(plan).decode()})

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()

    def send(self) -> dict[str, float]:
        """Bring a version over that the source has. Returns seconds, and processor seconds of both."""
        self._version += 1
        begin = {"op": "begin", "number": self._version, "version": self._version, "receivers": ["receiver"],
                 "addresses": self._addresses}  # fmt: skip
        source, receiver = self._children
        source.ask(begin)
        source.ask({"op": "write", "version": self._version, "rank": 0})
        before = [child.ask({"op": "usage"}) for child in self._children]
        start = time.perf_counter()
        receiver.ask(begin)
        receiver.ask({"op": "wait", "version": self._version})
        seconds = time.perf_counter() - start
        after = [child.ask({"op": "usage"}) for child in self._children]
        used = [
            {key: new[key] - old[key] for key in ("user_s", "system_s")} for old, new in zip(before, after, strict=True)
        ]
        return {
            "seconds": seconds,
            "send_s": sum(used[0].values()),
            "receive_s": sum(used[1].values()),
            "receive_user_s": used[1]["user_s"],
        }


def make(num_tensors: int) -> ChunkPlan:
    layout = compute_layout((f"{number:03}", (ELEMENTS,), "bfloat16") for number in range(num_tensors))
    return make_plan(layout, [[(place.name, 0, ELEMENTS) for place in layout.tensors]], ["source"])


def measure(quick: bool, num_rounds: int) -> list[dict[str, Any]]:
    plan = make(QUICK_TENSORS if quick else NUM_TENSORS)
    gigabytes = plan.layout.num_bytes / 1e9
    rounds = []
    with memory_folder() as root, TemporaryDirectory() as folder:
        pairs = {lanes: Pair(lanes, plan, Path(folder), root) for lanes in LANES}
        try:
            for number in range(WARM + num_rounds):
                for lanes, pair in pairs.items():
                    found = {name: seconds / gigabytes for name, seconds in pair.send().items()}
                    if number >= WARM:
                        rounds.append({"lanes": lanes, "bytes": plan.layout.num_bytes, **found})
        finally:
            for pair in pairs.values():
                pair.__exit__()
    return rounds


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['bytes'] / 1e9:.2f} GB from a relay to another, over loopback: seconds a GB, medians (range)",
        ["lanes"], ["passed", "processor, to receive", "of it outside of the kernel", "processor, to send"],
    )  # fmt: skip
    for lanes in LANES:
        some = [one for one in rounds if one["lanes"] == lanes]
        columns = ("seconds", "receive_s", "receive_user_s", "send_s")
        table.add_row(str(lanes), *(spread([one[column] for one in some], 2) for column in columns))
    show(table, 110)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    """Lanes must not make the work itself dearer."""

    def median(lanes: int) -> float:
        return statistics.median(one["receive_s"] for one in rounds if one["lanes"] == lanes)

    return [Target("processor time to receive over 4 lanes, of that over one", median(4) / median(1), "x", "<=", 1.25)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = measure(arguments.quick, 1 if arguments.quick else arguments.rounds or NUM_ROUNDS)
    show_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "relay", rounds, targets)


if __name__ == "__main__":
    main()
