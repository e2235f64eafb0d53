"""Against what others have measured: seconds of steps of whole runs and of trainers.

Factors that are common to all plans are fitted to the other systems, and the system that was left out is predicted.
Bars, written down before anything was fitted: mean error at most 15%, no row above 25%, the order right in 90% of the
pairs that differ by more than 10%. Where one row alone is left out in turn: mean error at most 25%, and 85% of those
pairs; of rows that are held out, with the factors as they are, the same. Beside the closed form stand two that people
use: `lockstep`, in which an asynchronous step makes its batch from nothing, and `linear`, which scales the system's
first row of a workload by GPUs.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from benchmarks.harness import Target, new_table, show
from benchmarks.planner.published_rows import Row, rows
from penstock.planner.cost_model import Efficiencies

MEAN_ERROR, LARGEST_ERROR, LEAST_ORDERED, DIFFERENT = 0.15, 0.25, 0.90, 0.10
MEAN_ERROR_ALONE, LEAST_ORDERED_ALONE = 0.25, 0.85
"""Bars where one row alone is left out."""
FITTED = ("training", "training_mixture", "decode_factor", "update_s", "layer_s", "layer_mixture_s")
"""Factors that all plans share, and that are fitted."""
BEFORE = Efficiencies(
    training=0.45, training_mixture=0.45, decode_factor=1.0, update_s=0.5, layer_s=1.2e-3, layer_mixture_s=1.2e-3
)  # fmt: skip
"""Factors before any of these rows was seen."""
STARTS = (1.0, 10.0)
"""Multiples of `layer_mixture_s` from which it is fitted: a mixture is slow by its products, or beside them."""
UNUSUAL = 0.01
"""Error that a factor counts for that is e times the one before: rows that do not tell it leave it as it is."""
STEPS = (1.5, 1.15, 1.04)
"""Factors by which a fitted one is changed, coarse to fine."""


def fitted(of: Sequence[Row], start: Efficiencies | None = None) -> Efficiencies:
    """The factors with which the logarithms of the rows' errors are least, in the mean. `start`: factors near them;
    None: those before any row was seen."""
    if start is not None:
        return _descended(of, start, STEPS[-1:])
    starts = [replace(BEFORE, layer_mixture_s=BEFORE.layer_mixture_s * times) for times in STARTS]
    return min((_descended(of, start, STEPS) for start in starts), key=lambda rates: _error(of, rates))


def left_out_in_turn(of: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row, predicted with factors that are fitted to all others."""
    found = []
    for row in of:
        rates = fitted([other for other in of if other is not row], Efficiencies())
        found.append({
            "system": row.system, "row": row.name, "workload": row.workload, "measured_s": row.measured,
            "predicted_s": row.predict(rates, False),
        })  # fmt: skip
    return found


def _descended(of: Sequence[Row], best: Efficiencies, steps: Sequence[float]) -> Efficiencies:
    error = _error(of, best)
    for factor in steps:
        improves = True
        while improves:
            improves = False
            for changed in _changes(factor):
                tried = replace(best, **{name: getattr(best, name) * change for name, change in changed.items()})
                if (found := _error(of, tried)) < error - 1e-4:
                    best, error, improves = tried, found, True
    return best


def _changes(factor: float) -> list[dict[str, float]]:
    """Changes of one factor, and of two at once, as some of them make up for each other."""
    ways = (factor, 1 / factor)
    pairs = itertools.combinations(FITTED, 2)
    both = [dict(zip(names, way, strict=True)) for names in pairs for way in itertools.product(ways, repeat=2)]
    return [{name: way} for name in FITTED for way in ways] + both


def _error(of: Sequence[Row], rates: Efficiencies) -> float:
    strange = sum(abs(math.log(getattr(rates, name) / getattr(BEFORE, name))) for name in FITTED)
    return sum(_error_of(row, rates) for row in of) / len(of) + UNUSUAL * strange


@lru_cache(maxsize=2**17)
def _error_of(row: Row, rates: Efficiencies) -> float:
    return abs(math.log(row.predict(rates, False) / row.measured))


# The side of the benchmark.

SIDES = ("predicted_s", "alone_s", "lockstep_s", "linear_s")
HELD_OUT = "held_out_s"


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    """Leave each system out in turn, and predict it. `quick`: with the factors as they are."""
    found, alone = [], {one["row"]: one["predicted_s"] for one in left_out_in_turn(rows())}
    for system in dict.fromkeys(row.system for row in rows()):
        rates = Efficiencies() if quick else fitted([row for row in rows() if row.system != system])
        own, first = [row for row in rows() if row.system == system], dict[str, Row]()
        for row in own:
            before = first.setdefault(row.workload, row)
            found.append({
                "system": system, "row": row.name, "workload": row.workload, "measured_s": row.measured,
                "predicted_s": row.predict(rates, False), "lockstep_s": row.predict(rates, True),
                "linear_s": before.measured * before.gpus / row.gpus, "alone_s": alone[row.name],
                "factors": {name: getattr(rates, name) for name in FITTED},
            })  # fmt: skip
    return found + [
        {"system": row.system, "row": row.name, "workload": row.workload, "measured_s": row.measured,
         HELD_OUT: row.predict(Efficiencies(), False)}
        for row in rows("held_out")
    ]  # fmt: skip


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    apart, rounds = _divided(rounds)
    held_out, right_held_out = errors(apart, HELD_OUT), ordered(apart, HELD_OUT)
    found, right = errors(rounds, "predicted_s"), ordered(rounds, "predicted_s")
    found_alone, right_alone = errors(rounds, "alone_s"), ordered(rounds, "alone_s")
    return [
        Target(
            f"mean error of {len(rounds)} published rows, their system left out", _mean(found), "", "<=", MEAN_ERROR
        ),
        Target("largest error of one", max(found), "", "<=", LARGEST_ERROR),
        Target(f"right order of {len(right)} pairs that differ by 10%", _mean(right), "", ">=", LEAST_ORDERED),
        Target("mean error, each row alone left out", _mean(found_alone), "", "<=", MEAN_ERROR_ALONE),
        Target(
            "right order of those pairs, each row alone left out", _mean(right_alone), "", ">=", LEAST_ORDERED_ALONE
        ),
        Target(f"mean error of {len(apart)} rows held out", _mean(held_out), "", "<=", MEAN_ERROR_ALONE),
        Target(
            f"right order of {len(right_held_out)} of their pairs", _mean(right_held_out), "", ">=", LEAST_ORDERED_ALONE
        ),
    ]


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    apart, rounds = _divided(rounds)
    table = new_table("seconds, each system left out of the fit", ["system", "row"],
                      ["measured", "predicted", "error", "alone", "lockstep", "linear"])  # fmt: skip
    for one in rounds:
        shown = [f"{one[side] / one['measured_s'] - 1:+.0%}" for side in SIDES]
        table.add_row(one["system"], one["row"], f"{one['measured_s']:.1f}", f"{one['predicted_s']:.1f}", *shown)
    show(table)
    table = new_table("all of them", ["model"], ["mean error", "largest", "pairs in order"])
    names = ("closed form", "closed form, one row left out", "lockstep", "linear in GPUs")
    for name, side in zip(names, SIDES, strict=True):
        found, right = errors(rounds, side), ordered(rounds, side)
        table.add_row(name, f"{_mean(found):.0%}", f"{max(found):.0%}", f"{_mean(right):.0%} of {len(right)}")
    show(table)
    table = new_table(
        "seconds of rows held out, factors as they are", ["system", "row"], ["measured", "predicted", "error"]
    )
    for one in apart:
        ends = f"{one['measured_s']:.1f}", f"{one[HELD_OUT]:.1f}", f"{one[HELD_OUT] / one['measured_s'] - 1:+.0%}"
        table.add_row(one["system"], one["row"], *ends)
    show(table)


def _divided(rounds: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split rows into those that are held out and those that factors are fitted to."""
    return [one for one in rounds if HELD_OUT in one], [one for one in rounds if HELD_OUT not in one]


def errors(rounds: Sequence[dict[str, Any]], side: str) -> list[float]:
    """Errors of a side's predictions, as shares of what was measured."""
    return [abs(one[side] / one["measured_s"] - 1) for one in rounds]


def ordered(rounds: Sequence[dict[str, Any]], side: str) -> list[bool]:
    """Whether pairs of one workload are in the order that was measured, of those that differ enough."""
    pairs = [
        (one, two) for one, two in itertools.combinations(rounds, 2)
        if (one["system"], one["workload"]) == (two["system"], two["workload"])
        and abs(math.log(one["measured_s"] / two["measured_s"])) > math.log(1 + DIFFERENT)
    ]  # fmt: skip
    return [(one[side] < two[side]) == (one["measured_s"] < two["measured_s"]) for one, two in pairs]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
