"""A run in a dozen numbers, from its directory alone: the cards of the report, and what `penstock run` prints at the
end."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.orchestrator.reporting.faults import faults_of
from penstock.orchestrator.reporting.progress import elapsed


@dataclass(frozen=True)
class Card:
    """One number with its label; `detail` is the small print, `good` colours it."""

    label: str
    value: str
    detail: str = ""
    good: bool | None = None


def cards(directory: RunDirectory) -> list[Card]:
    """What is worth saying of the run. Numbers that it does not have are left out."""
    metrics, config = directory.read_metrics(), directory.read_config()
    found = [
        _accuracy(metrics),
        _reward(metrics),
        _loss(metrics),
        _steps(metrics, config),
        _wall_time(directory, metrics),
        _throughput(metrics),
        _staleness(metrics, config),
        _mismatch(metrics),
        _dropped(metrics),
        _failed_checkpoints(directory),
        _faults(directory, metrics),
        _warnings(directory),
    ]
    return [card for card in found if card is not None]


def points_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) where the value is a finite number. The last entry of a step counts."""
    points = {}
    for entry in metrics:
        value, step = entry.get(name), entry.get("step")
        if isinstance(value, int | float) and isinstance(step, int | float) and math.isfinite(value):
            points[float(step)] = float(value)
    return sorted(points.items())


def _values(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for _, value in points_of(metrics, name)]


def _accuracy(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    points = points_of(metrics, "accuracy/heldout")
    if not points:
        return None
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return Card("Held-out accuracy", f"{first:.1%}", f"at step {first_step:g}")
    best_step, best = max(points, key=lambda point: point[1])
    detail = f"steps {first_step:g} to {last_step:g}" + (f"; best {best:.1%} at {best_step:g}" if best > last else "")
    return Card("Held-out accuracy", f"{first:.1%} → {last:.1%}", detail, last > first)


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last tenth: single steps are noisy."""
    share = max(1, min(10, len(values) // 10))
    return statistics.fmean(values[:share]), statistics.fmean(values[-share:])


def _reward(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    values = _values(metrics, "reward/mean")
    if not values:
        return None
    first, last = _ends(values)
    return Card(
        "Mean reward",
        f"{first:.3f} → {last:.3f}",
        f"best step {max(values):.3f}",
        last > first if len(values) > 1 else None,
    )


def _loss(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    values = _values(metrics, "actor/loss")
    if not values or _values(metrics, "reward/mean"):
        return None
    first, last = _ends(values)
    return Card("Loss", f"{first:.3f} → {last:.3f}", good=last < first if len(values) > 1 else None)


def _steps(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Card:
    done = int(max((step for step, _ in points_of(metrics, "step")), default=0))
    asked = (config.get("trainer") or {}).get("max_steps")
    short = isinstance(asked, int) and done < asked
    return Card("Policy updates", f"{done}", f"of {asked} asked for" if short else "")


def _wall_time(directory: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    training = sum(_values(metrics, "timing_s/step"))
    stamps = [event.get("time") for event in directory.read_events()]
    total = training
    try:
        times = [datetime.fromisoformat(str(stamp)) for stamp in stamps]
        total = max(training, (times[-1] - times[0]).total_seconds()) if times else training
    except ValueError:
        pass  # events of another hand: the sum of the steps is then the best that is known
    return Card("Wall time", elapsed(total), f"{elapsed(training)} of it in steps") if total else None


def _throughput(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    values, tokens = _values(metrics, "perf/samples_per_s"), _values(metrics, "perf/tokens_per_s")
    if not values:
        return None
    detail = f"{statistics.median(tokens):,.0f} response tokens/s" if tokens else ""
    return Card("Samples per second", f"{statistics.median(values):,.1f}", f"median; {detail}" if detail else "median")


def _staleness(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Card | None:
    values, bound = _values(metrics, "staleness/max"), config.get("max_staleness")
    if not values:
        return None
    kept = None if bound is None else max(values) <= bound
    return Card(
        "Staleness",
        f"{max(values):g} ≤ {bound}" if kept else f"{max(values):g}",
        "largest, of any token trained; bound",
        kept,
    )


def _mismatch(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    values = _values(metrics, "mismatch/logprob_abs_mean")
    if not values:
        return None
    return Card(
        "Trainer against engine",
        f"{statistics.median(values):.1e}",
        f"mean |Δ log p|, median step; worst {max(values):.1e}",
    )


def _dropped(metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    last: dict[str, float] = {}
    for entry in metrics:
        last |= {name: value for name, value in entry.items() if name.startswith("dropped/") and value}
    if not last:
        return None
    reasons = ", ".join(f"{name.partition('/')[2]} {value:g}" for name, value in last.items())
    return Card("Dropped samples", f"{sum(last.values()):g}", reasons, False)


def _failed_checkpoints(directory: RunDirectory) -> Card | None:
    """From the events, since the last one may fail after the last step was logged."""
    failed = [event for event in directory.read_events() if event.get("kind") == "checkpoint_failed"]
    if not failed:
        return None
    return Card("Failed checkpoints", f"{len(failed)}", f"last: {failed[-1].get('message', '')}", False)


def _faults(directory: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> Card | None:
    """Members that were lost, and what share of the time was spent training all the same."""
    found = faults_of(directory.read_events())
    if not found:
        return None
    roles = ", ".join(f"{role} {count}" for role, count in Counter(fault.role for fault in found).items())
    shares = _values(metrics, "faults/effective_time")
    effective = f"; effective training time {shares[-1]:.1%}" if shares else ""
    is_mended = all(fault.seconds is not None for fault in found)
    return Card("Members lost", f"{len(found)}", f"{roles}{effective}", is_mended)


def _warnings(directory: RunDirectory) -> Card | None:
    """What the run said is wrong with it: `diagnosis/`."""
    found = [event for event in directory.read_events() if event.get("kind") == "warning"]
    if not found:
        return None
    last = found[-1]
    return Card("Warnings", f"{len(found)}", f"last, step {last.get('step')}: {last.get('text')}", False)
