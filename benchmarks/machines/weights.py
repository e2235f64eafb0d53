"""Weights from trainers' machines to engines', by chains of relays.

A publication of Qwen2.5-0.5B's shapes (bfloat16), written by a rank on each of the machines that have ranks, as they
publish in a run. *chain*: as a run does it. *star*: the same relays, but every receiver asks the ranks' machines.
*Ray*: `ray.put` there, `ray.get` on the receivers. Then a relay is killed half way: with its process, and with its
machine, which says nothing any more.

The model: `(P + (h - 1) * c) / B`, of P bytes in chunks of c at most over a chain of h receivers, on links of B bytes a
second each way.
"""

import math
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.harness import Child, Target, new_table, show
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan, chain, choose_chunk_bytes, make_plan
from penstock.workers.weights.publication.layout import compute_layout
from tests.machines.cluster import Cluster, machines

RATE, RATE_BYTES = "1gbit", 125e6
SHM, ROOT = "4g", "/dev/shm/penstock-bench"
OBJECT_STORE_BYTES = 3 * 2**29
NUM_ROUNDS = 3
LAYERS, HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 24, 896, 4864, 128, 151936
"""Sizes of Qwen2.5-0.5B: 494M parameters."""
QUICK = {"vocabulary": 8192, "num_layers": 4}
HALF = 0.5


@dataclass(frozen=True)
class Case:
    """Machines that have ranks and machines that receive, by their number."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]


CASES = (Case((1, 2), (3,)), Case((1, 2), (1, 3)), Case((1, 2), (1, 2, 3)), Case((1,), (2, 3)))
KILLED = Case((1,), (2, 3))


def shapes(vocabulary: int = VOCABULARY, num_layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    layer = {
        "q": (HIDDEN, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, HIDDEN), "q_bias": (HIDDEN,),
        "k_bias": (KEYS,), "v_bias": (KEYS,), "gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE), "norm": (HIDDEN,), "norm_2": (HIDDEN,),
    }  # fmt: skip
    layers = {f"{number:02}.{name}": shape for number in range(num_layers) for name, shape in layer.items()}
    return {"embed": (vocabulary, HIDDEN), **layers, "norm": (HIDDEN,)}


def plan_of(tensors: dict[str, tuple[int, ...]], case: Case) -> ChunkPlan:
    """Make the plan. Each source's rank has as many rows of each tensor as FSDP2 gives it."""
    layout = compute_layout((name, shape, "bfloat16") for name, shape in tensors.items())
    num_ranks = len(case.sources)
    pieces: list[list[tuple[str, int, int]]] = [[] for _ in case.sources]
    for place in layout.tensors:
        num_rows, *row = place.shape or (1,)
        rows = -(-num_rows // num_ranks)
        for rank in range(num_ranks):
            first, last = (min(num_rows, rows * number) * math.prod(row) for number in (rank, rank + 1))
            pieces[rank].append((place.name, first, last - first))
    chunk_bytes = choose_chunk_bytes(layout.num_bytes, num_ranks, len(case.receivers))
    return make_plan(layout, pieces, [str(number) for number in case.sources], chunk_bytes)


class Nodes:
    """A relay on each machine that takes part. Lifecycle: a context; `send` a version after the other."""

    def __init__(
        self, cluster: Cluster, case: Case, plan: ChunkPlan, logs: Path, root: str = "", arguments: Sequence[str] = ()
    ) -> None:
        """`root`: what the root's name ends with. `arguments`: of each relay."""
        self._cluster, self._case, self.plan = cluster, case, plan
        self._root = f"{ROOT}{root}"
        self.children: dict[int, Child] = {}
        for number in sorted({*case.sources, *case.receivers}):
            machine = cluster[number]
            words = ["--name", str(number), "--host", machine.address, "--root", self._root, *arguments]
            log = logs / f"relay_{number}{root}.log"
            self.children[number] = Child(f"relay {number}", "relay_node", log, words, sys.executable, machine.start)
        self._addresses = {str(number): child.ready()["address"] for number, child in self.children.items()}
        for child in self.children.values():
            child.ask({"op": "plan", "plan": msgspec.json.encode(plan).decode()})
        self._number = 0

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.close()
        for machine in self._cluster:
            if machine.alive:
                machine.run(["rm", "-rf", self._root])

    def step(self, rate: float) -> None:
        """Have every rank's weights move by so much."""
        with ThreadPoolExecutor() as threads:
            list(
                threads.map(lambda number: self.children[number].ask({"op": "step", "rate": rate}), self._case.sources)
            )

    def send(
        self, is_star: bool = False, await_of: Sequence[int] | None = None, *, anew: bool = True
    ) -> dict[str, Any]:
        """Send one version. `await_of`: the nodes to wait for. `anew`: no weight is as it was. Returns seconds, from
        the first rank's first byte to the last node's last."""
        self._anew = anew
        self._number += 1
        receivers = [str(number) for number in self._case.receivers]
        for number, child in self.children.items():
            # A chain that has but one receiver asks the source: so each of a star is told of itself alone.
            told = [str(number)] if is_star and str(number) in receivers else receivers
            child.ask({"op": "begin", "number": self._number, "version": self._number, "receivers": told,
                       "addresses": self._addresses})  # fmt: skip
        before = self._link_bytes()
        start = time.perf_counter()
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._write, enumerate(self._case.sources)))
            waiting = self._case.receivers if await_of is None else await_of
            stats = list(threads.map(self._wait, waiting))
        seconds = time.perf_counter() - start
        after = self._link_bytes()
        most = max(max(after[n][way] - before[n][way] for way in (0, 1)) for n in after)
        return {"seconds": seconds, "most_link_bytes": most, "stats": stats}

    def first_of_next(self) -> int:
        """Return the node that will be the first of the next version's chain, where there is one."""
        receivers = [str(number) for number in self._case.receivers]
        broadcast = Broadcast(self._number + 1, self._number + 1, receivers, {})
        return int(chain(broadcast, self.plan.sources, self.plan.sources[0])[0])

    def _write(self, which: tuple[int, int]) -> None:
        rank, number = which
        self.children[number].ask({"op": "write", "version": self._number, "rank": rank, "anew": self._anew})

    def _wait(self, number: int) -> dict[str, Any]:
        return self.children[number].ask({"op": "wait", "version": self._number})

    def _link_bytes(self) -> dict[int, tuple[int, int]]:
        return {number: self._cluster[number].link_bytes() for number in self.children if self._cluster[number].alive}


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    tensors = shapes(**QUICK) if quick else shapes()
    times = 1 if quick else num_rounds or NUM_ROUNDS
    rounds: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="penstock-bench-") as folder, machines(3, rate=RATE, shm=SHM) as cluster:
        for case in CASES[1:2] if quick else CASES:
            rounds += _sent(cluster, case, tensors, times, Path(folder))
        rounds += _killed(tensors, Path(folder))
        rounds += _by_ray(cluster, CASES[1:2] if quick else CASES, tensors, times, Path(folder))
    return rounds


def _sent(
    cluster: Cluster, case: Case, tensors: dict[str, tuple[int, ...]], times: int, logs: Path
) -> list[dict[str, Any]]:
    plan = plan_of(tensors, case)
    rounds = []
    with Nodes(cluster, case, plan, logs) as nodes:
        for _ in range(2):  # into pages that were never touched: as a run's first two versions
            nodes.send()
        for way in ("chain", "star"):
            for _ in range(times):
                rounds.append(_facts(case, way, plan) | nodes.send(is_star=way == "star"))
    return rounds


def _facts(case: Case, way: str, plan: ChunkPlan) -> dict[str, Any]:
    num_bytes = plan.layout.num_bytes
    most = max(end - start for start, end in plan.spans)
    model_s = (num_bytes + (len(case.receivers) - 1) * most) / RATE_BYTES
    return {
        "sources": case.sources, "receivers": case.receivers, "way": way, "bytes": num_bytes, "rate": RATE,
        "chunk_bytes": plan.chunk_bytes, "chunks": len(plan.chunks), "model_s": model_s,
    }  # fmt: skip


def _killed(tensors: dict[str, tuple[int, ...]], logs: Path) -> list[dict[str, Any]]:
    """Kill the first of a chain of two, half way: its process alone, and the machine without a word."""
    plan = plan_of(tensors, KILLED)
    rounds = []
    for way in ("process killed", "machine lost"):
        with machines(3, rate=RATE, shm=SHM) as cluster, Nodes(cluster, KILLED, plan, logs) as nodes:
            nodes.send()
            nodes.send()
            undisturbed = nodes.send()["seconds"]
            first, other = (2, 3) if nodes.first_of_next() == 2 else (3, 2)

            def kill(cluster: Cluster = cluster, first: int = first, way: str = way) -> None:
                if way == "machine lost":
                    cluster[first].cut()
                cluster[first].kill()

            timer = threading.Timer(HALF * undisturbed, kill)
            timer.start()
            facts = _facts(KILLED, way, plan) | nodes.send(await_of=[other])
            timer.join()
            rounds.append(facts | {"undisturbed_s": undisturbed})
    return rounds


def _by_ray(
    cluster: Cluster, cases: Sequence[Case], tensors: dict[str, tuple[int, ...]], times: int, logs: Path
) -> list[dict[str, Any]]:
    cluster.start_ray(object_store_bytes=OBJECT_STORE_BYTES)
    rounds = []
    head = cluster[1]
    child = Child("ray", "ray_broadcast", logs / "ray.log", [], sys.executable, head.start)
    child.ready()
    try:
        for case in cases:
            plan = plan_of(tensors, case)
            request = {
                "sources": [cluster[number].address for number in case.sources],
                "receivers": [cluster[number].address for number in case.receivers],
                "bytes": plan.layout.num_bytes,
            }
            child.ask(request)
            rounds += [_facts(case, "Ray", plan) | child.ask(request) for _ in range(times)]
    finally:
        child.close()
    return rounds


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['bytes'] / 1e6:,.0f} MB of weights between machines, links of {RATE} each way; medians",
        ["ranks on", "to", "way"], ["s", "model s", "of the model", "most over a link, of the payload"],
    )  # fmt: skip
    for key in dict.fromkeys(_key(one) for one in rounds):
        chosen = [one for one in rounds if _key(one) == key]
        seconds, model = statistics.median(one["seconds"] for one in chosen), chosen[0]["model_s"]
        link = max(one.get("most_link_bytes", 0) for one in chosen) / chosen[0]["bytes"]
        words = [", ".join(map(str, numbers)) for numbers in key[:2]]
        table.add_row(*words, key[2], f"{seconds:.2f}", f"{model:.2f}", f"{seconds / model:.2f}x",
                      f"{link:.2f}x" if link else "-")  # fmt: skip
    show(table, 110)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    chains = [one for one in rounds if one["way"] == "chain"]
    keys = dict.fromkeys(_key(one) for one in chains)
    over = max(statistics.median(one["seconds"] / one["model_s"] for one in chains if _key(one) == key) for key in keys)
    link = max(one["most_link_bytes"] / one["bytes"] for one in chains)
    lost = {one["way"]: one["seconds"] - one["undisturbed_s"] for one in rounds if "undisturbed_s" in one}
    return [
        Target("weights: time of a chain over the model's", over, "x", "<=", 1.2),
        *(Target(f"weights: a relay's {way}: what it costs the others", cost, "s", "<=", 2.0)
          for way, cost in lost.items()),
        Target("weights: most bytes over a link, of the payload", link, "x", "<=", 1.05),
    ]  # fmt: skip


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(one["sources"]), tuple(one["receivers"]), one["way"]
