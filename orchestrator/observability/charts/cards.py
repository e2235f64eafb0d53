"""A run in a dozen numbers: the cards of the report and of the run's page, and what `penstock run` prints at the end.
Pure. The columns of `metrics.jsonl` are read by `observability/runs/columns.py`.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.orchestrator.observability.faults import faults_of
from penstock.orchestrator.observability.marks import best_of

Event = Mapping[str, Any]


class Numbers(Protocol):
    """A run's metrics, by step."""

    @property
    def keys(self) -> list[str]: ...

    @property
    def steps(self) -> NDArray[np.float64]: ...

    def __getitem__(self, key: str, /) -> NDArray[np.float64]:
        """Values of a metric; NaN where a step has none."""


@dataclass(frozen=True)
class Card:
    """A card: a number with its label; `detail` is the small print, `good` colours it."""

    label: str
    value: str
    detail: str = ""
    good: bool | None = None


def cards(
    numbers: Numbers, config: Mapping[str, Any], events: Sequence[Event], seconds: float, price: float = 0.0
) -> list[Card]:
    """The cards of a run. `seconds`: from its first event to its last. `price`: money for an hour of a GPU. Numbers
    that it does not have are left out."""
    found = [
        _accuracy(numbers),
        _reward(numbers),
        _loss(numbers),
        _steps(numbers, config),
        _wall_time(numbers, seconds),
        _throughput(numbers),
        _cost(numbers, events, price),
        _staleness(numbers, config),
        _mismatch(numbers),
        _dropped(numbers),
        _best_checkpoint(events),
        _failed_checkpoints(events),
        _faults(numbers, events),
        _warnings(events),
    ]
    return [card for card in found if card is not None]


def elapsed(seconds: float | None) -> str:
    """Seconds as text: `0:07`, `12:30`, `1:02:03`."""
    total = int(seconds or 0)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"


def _points(numbers: Numbers, name: str) -> list[tuple[float, float]]:
    """Pairs (step, value) where a metric has a value."""
    values = numbers[name]
    known = np.isfinite(values)
    return list(zip(numbers.steps[known].tolist(), values[known].tolist(), strict=True))


def _values(numbers: Numbers, name: str) -> list[float]:
    values = numbers[name]
    return [float(value) for value in values[np.isfinite(values)]]


def _accuracy(numbers: Numbers) -> Card | None:
    points = _points(numbers, "accuracy/heldout")
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


def _reward(numbers: Numbers) -> Card | None:
    values = _values(numbers, "reward/mean")
    if not values:
        return None
    first, last = _ends(values)
    return Card(
        "Mean reward",
        f"{first:.3f} → {last:.3f}",
        f"best step {max(values):.3f}",
        last > first if len(values) > 1 else None,
    )


def _loss(numbers: Numbers) -> Card | None:
    values = _values(numbers, "actor/loss")
    if not values or _values(numbers, "reward/mean"):
        return None
    first, last = _ends(values)
    return Card("Loss", f"{first:.3f} → {last:.3f}", good=last < first if len(values) > 1 else None)


def _steps(numbers: Numbers, config: Mapping[str, Any]) -> Card:
    done = int(numbers.steps.max()) if len(numbers.steps) else 0
    trainer = config.get("trainer")
    asked = trainer.get("max_steps") if isinstance(trainer, Mapping) else None
    short = isinstance(asked, int) and done < asked
    return Card("Policy updates", f"{done}", f"of {asked} asked for" if short else "")


def _wall_time(numbers: Numbers, seconds: float) -> Card | None:
    training = sum(_values(numbers, "timing_s/step"))
    total = max(training, seconds)
    return Card("Wall time", elapsed(total), f"{elapsed(training)} of it in steps") if total else None


def _throughput(numbers: Numbers) -> Card | None:
    values, tokens = _values(numbers, "perf/samples_per_s"), _values(numbers, "perf/tokens_per_s")
    if not values:
        return None
    detail = f"{statistics.median(tokens):,.0f} response tokens/s" if tokens else ""
    return Card("Samples per second", f"{statistics.median(values):,.1f}", f"median; {detail}" if detail else "median")


def _cost(numbers: Numbers, events: Sequence[Event], price: float) -> Card | None:
    """The card of GPU-hours, or with a price of money: of all steps, and what a step, a million response tokens and a
    point of held-out accuracy cost."""
    placed = [event for event in events if event.get("kind") == "placed"]
    seconds = numbers["timing_s/step"]
    hours = float(placed[-1].get("gpus") or 0.0) * np.nansum(seconds) / 3600 if placed else 0.0
    if not hours:
        return None
    cost = hours * (price or 1.0)
    millions = np.nansum(numbers["perf/tokens_per_s"] * seconds) / 1e6
    accuracies = _values(numbers, "accuracy/heldout") or [0.0]
    parts = {
        "a step": float(np.isfinite(seconds).sum()), "a million response tokens": millions,
        "a point of held-out accuracy": 100 * (accuracies[-1] - accuracies[0]),
    }  # fmt: skip
    detail = [f"{cost / number:.2g} {what}" for what, number in parts.items() if number > 0]
    if price:
        return Card("Cost", f"{cost:,.2f}", "; ".join([f"{hours:,.1f} GPU-hours", *detail]))
    return Card("GPU-hours", f"{hours:,.1f}", "; ".join(detail))


def _staleness(numbers: Numbers, config: Mapping[str, Any]) -> Card | None:
    values, bound = _values(numbers, "staleness/max"), config.get("max_staleness")
    if not values:
        return None
    bound = bound if isinstance(bound, int) else None
    kept = None if bound is None else max(values) <= bound
    return Card(
        "Staleness",
        f"{max(values):g} ≤ {bound}" if kept else f"{max(values):g}",
        "largest, of any token trained; bound",
        kept,
    )


def _mismatch(numbers: Numbers) -> Card | None:
    values = _values(numbers, "mismatch/logprob_abs_mean")
    if not values:
        return None
    return Card(
        "Trainer against engine",
        f"{statistics.median(values):.1e}",
        f"mean |Δ log p|, median step; worst {max(values):.1e}",
    )


def _dropped(numbers: Numbers) -> Card | None:
    counts = {name: _values(numbers, name) for name in numbers.keys if name.startswith("dropped/")}
    last = {name: values[-1] for name, values in counts.items() if values and values[-1]}
    if not last:
        return None
    reasons = ", ".join(f"{name.partition('/')[2]} {value:g}" for name, value in last.items())
    return Card("Dropped samples", f"{sum(last.values()):g}", reasons, False)


def _best_checkpoint(events: Sequence[Event]) -> Card | None:
    best = best_of(events)
    if best is None:
        return None
    detail = f"{best['metric']} {best['score']:.4g}; penstock export RUN DIRECTORY --best"
    return Card("Best checkpoint", f"step {best['step']}", detail)


def _failed_checkpoints(events: Sequence[Event]) -> Card | None:
    """The card of failed checkpoints, from the events, since the last may fail after the last step was logged."""
    failed = [event for event in events if event.get("kind") == "checkpoint_failed"]
    if not failed:
        return None
    return Card("Failed checkpoints", f"{len(failed)}", f"last: {failed[-1].get('message', '')}", False)


def _faults(numbers: Numbers, events: Sequence[Event]) -> Card | None:
    """The card of lost members, with the share of the time that was spent training all the same."""
    found = faults_of(events)
    if not found:
        return None
    roles = ", ".join(f"{role} {count}" for role, count in Counter(fault.role for fault in found).items())
    shares = _values(numbers, "faults/effective_time")
    effective = f"; effective training time {shares[-1]:.1%}" if shares else ""
    is_recovered = all(fault.seconds is not None for fault in found)
    return Card("Members lost", f"{len(found)}", f"{roles}{effective}", is_recovered)


def _warnings(events: Sequence[Event]) -> Card | None:
    """The card of what the run said is wrong with it: `diagnosis/`."""
    found = [event for event in events if event.get("kind") == "warning"]
    if not found:
        return None
    last = found[-1]
    return Card("Warnings", f"{len(found)}", f"last, step {last.get('step')}: {last.get('text')}", False)
