"""Weights between machines of which a step has changed little, or all: as a run sends them, and always whole.

A publication of Qwen2.5-0.5B's shapes (bfloat16) by a rank on machine 1, to machines 2 and 3, over links of 1 Gbit/s.
*Steps*: weights of standard deviation 0.02 move by 1e-6 each, this way or that, from version to version: a step of Adam
at that learning rate, or more. *Anew*: no weight stays. Sides alternate; each has relays of its own.
"""

import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Target, new_table, show
from benchmarks.machines.weights import NUM_ROUNDS, QUICK, RATE, SHM, Case, Nodes, plan_of, shapes
from tests.machines.cluster import machines

CASE = Case((1,), (2, 3))
LEARNING_RATE = 1e-6
SIDES = {"whole": ["--whole"], "as a run": []}
WAYS = ("steps", "anew")


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    plan, rounds = plan_of(shapes(**QUICK) if quick else shapes(), CASE), []
    with TemporaryDirectory(prefix="penstock-bench-") as folder, machines(3, rate=RATE, shm=SHM) as cluster:
        for way in WAYS:
            with ExitStack() as stack:
                sides = {
                    side: stack.enter_context(Nodes(cluster, CASE, plan, Path(folder), root=side[:2], arguments=words))
                    for side, words in SIDES.items()
                }
                for number in range(-2, 1 if quick else num_rounds or NUM_ROUNDS):
                    for side, nodes in sides.items():
                        before = _shares(nodes)
                        if way == "steps" and number > -2:
                            nodes.step(LEARNING_RATE)
                        sent = nodes.send(anew=way == "anew")
                        shares = [_share(one, old) for one, old in zip(sent["stats"], before, strict=True)]
                        if number >= 0:  # into pages that were written before
                            rounds.append({"way": way, "side": side, "round": number, "bytes": plan.layout.num_bytes,
                                           "seconds": sent["seconds"], "received_share": max(shares)})  # fmt: skip
    return rounds


def _shares(nodes: Nodes) -> list[dict[str, Any]]:
    return [nodes.children[number].ask({"op": "stats"}) for number in CASE.receivers]


def _share(stats: dict[str, Any], before: dict[str, Any]) -> float:
    """Bytes that came, of those of the version."""
    came, whole = (stats[name] - before[name] for name in ("bytes_in", "bytes_whole"))
    return float(came / whole) if whole else 0.0


def ratios_of(rounds: list[dict[str, Any]], way: str) -> list[float]:
    """Seconds whole over those as a run sends it, round by round."""
    whole, ours = ([one["seconds"] for one in rounds if (one["way"], one["side"]) == (way, side)] for side in SIDES)
    return [one / other for one, other in zip(whole, ours, strict=True)]


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['bytes'] / 1e6:,.0f} MB of weights to two machines, links of {RATE} each way; medians",
        ["changes", "side"], ["s", "of whole's speed", "of the bytes, received"],
    )  # fmt: skip
    for way in WAYS:
        for side in SIDES:
            some = [one for one in rounds if (one["way"], one["side"]) == (way, side)]
            ratios = ratios_of(rounds, way)
            speed = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})" if side != "whole" else ""
            table.add_row(way, side, f"{statistics.median(one['seconds'] for one in some):.2f}", speed,
                          f"{statistics.median(one['received_share'] for one in some):.1%}")  # fmt: skip
    show(table, 110)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    steps, anew = (statistics.median(ratios_of(rounds, way)) for way in WAYS)
    return [
        Target("weights: speed after a step at lr 1e-6, over whole", steps, "x", ">=", 5.0),
        Target("weights: speed where all has changed, over whole", anew, "x", ">=", 0.95),
    ]
