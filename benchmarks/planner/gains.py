"""The gain of asynchrony that others have published, predicted from the seconds of the synchronous step alone, which
say how long responses are.

The bar was written down before: within 15%. AsyncFlow's mean of 1.59x (arXiv 2507.01663) is not among them: it is over
settings whose lengths and splits are not told.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from benchmarks.harness import Target, new_table, show
from benchmarks.planner.published_rows import FILE, Frozen, mean_of, step_s
from penstock.planner.cost_model import Efficiencies

LARGEST_ERROR = 0.15


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    return [_predicted(one) for one in yaml.safe_load(FILE.read_text(encoding="utf-8"))["gains"]]


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target(f"error of the gain of {one['system']} {one['name']}", abs(one["gain"] / one["published"] - 1), "", "<=",
               LARGEST_ERROR)
        for one in rounds
    ]  # fmt: skip


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table("gain of asynchrony", ["system"], ["published", "predicted", "in lockstep", "mean length"])
    for one in rounds:
        gains = [f"{one[side]:.2f}x" for side in ("published", "gain", "lockstep")]
        table.add_row(f"{one['system']} {one['name']}", *gains, f"{one['mean']:,.0f}")
    show(table)


def _predicted(one: dict[str, Any]) -> dict[str, Any]:
    rates, (synchronous, asynchronous) = Efficiencies(), one["runs"]
    mean = mean_of(Frozen(synchronous, name=one["name"]), rates)
    before = step_s(synchronous, mean, rates, False)
    return {
        "system": one["system"], "name": one["name"], "published": one["gain"], "mean": mean,
        "gain": before / step_s(asynchronous, mean, rates, False),
        "lockstep": before / step_s(asynchronous, mean, rates, True),
    }  # fmt: skip
