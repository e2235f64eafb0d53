"""The charts of a run, theme by theme, from the names of its metrics alone. Pure.

Every metric is in some chart: one that no chart below names comes last, together with others of its prefix.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from penstock.orchestrator.observability.charts.chart import THEMES, Chart, Curve

OF_THE_REWARD = ("mean", "std", "min", "max", "p10", "p50", "p90", "num_workers")
"""Metrics of `reward/` about the reward itself, and about its workers; the others there are rewards by name."""
RANGE = ("reward/min", "reward/max")
NO_CHART = ("step", "policy_version")
PHASES_OF_OTHERS = ("step", "checkpoint")
"""Metrics of `timing_s/` that are no phases: the whole, and what goes on beside it."""
LENGTH = "/response_length/mean"
"""Ending of a metric that each of several policies has."""


def policies_in(names: Iterable[str]) -> list[str]:
    """Policies by the names of a step's metrics; empty where one is trained.

    >>> policies_in(["response_length/mean", "solver/response_length/mean"])
    ['solver']
    """
    return [name.removesuffix(LENGTH) for name in names if name.endswith(LENGTH)]


class _Names:
    """Names of a run's metrics, and which of them have a chart already."""

    def __init__(self, keys: Collection[str]) -> None:
        self._left = dict.fromkeys(key for key in keys if key not in NO_CHART)
        self._policies = policies_in(self._left)

    def of(self, labels: Mapping[str, str]) -> tuple[Curve, ...]:
        """Curves of the metrics that are there and in no other chart, those of each of several policies too."""
        wanted = dict(labels)
        for policy in self._policies:
            for key, label in labels.items():
                own = policy if label == "policy" else f"{policy}: {label}"
                wanted[f"{policy}/{key.removeprefix('actor/')}"] = own
        return tuple(Curve(key, label) for key, label in wanted.items() if self._left.pop(key, 1) is None)

    def below(self, *prefixes: str, but: Iterable[str] = ()) -> tuple[Curve, ...]:
        """Curves of the metrics with these prefixes, labelled by what comes after the last "/" of the prefix."""
        found = {
            key: key.removeprefix(prefix.rpartition("/")[0] + "/")
            for prefix in prefixes
            for key in self._left
            if key.startswith(prefix) and key not in but
        }
        return self.of(found)

    def banded(self, key: str, label: str, low: str, high: str) -> tuple[Curve, ...]:
        """A curve with a band around it, where that is there."""
        found = self.of({key: label})
        if not found or found[0].key != key or not self.has(low, high):
            return found
        self.of({low: "", high: ""})
        return (Curve(key, label, low, high), *found[1:])

    def has(self, *keys: str) -> bool:
        return all(key in self._left for key in keys)

    def rest(self) -> dict[str, list[str]]:
        """Metrics that have no chart yet, by prefix."""
        found: dict[str, list[str]] = {}
        for key in self._left:
            found.setdefault(key.rpartition("/")[0] or key, []).append(key)
        return found


def charts_of(keys: Collection[str], config: Mapping[str, Any] | None = None) -> list[Chart]:
    """Charts, by theme. `keys`: metrics that have a value at some step. `config`: that of the run, for bounds."""
    names, found = _Names(keys), []
    for theme, makers in _MAKERS.items():
        charts = (chart for make in makers for chart in make(names, config or {}))
        found += [replace(chart, theme=theme) for chart in charts if chart.curves]
    for prefix, rest in names.rest().items():
        curves = tuple(Curve(key, key.removeprefix(f"{prefix}/")) for key in rest)
        found.append(Chart(f"other_{_file(prefix)}", prefix, curves))
    return sorted(found, key=lambda chart: THEMES.index(chart.theme))


def _rewards(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    has_quantiles = names.has("reward/p10", "reward/p90")
    band, whose = (("reward/p10", "reward/p90"), "four fifths") if has_quantiles else (RANGE, "all")
    yield Chart(
        "reward", "Reward", names.banded("reward/mean", "mean", *band),
        about=f"Mean over the samples of each step; the band has {whose} of them. It should rise.",
    )  # fmt: skip
    yield Chart(
        "reward_range", "Median and range of the reward", names.banded("reward/p50", "median", *RANGE),
        about="Half of the samples have at most this reward; the band reaches from the worst to the best.",
    )  # fmt: skip
    own = [f"reward/{name}" for name in OF_THE_REWARD]
    yield Chart(
        "reward_std", "Spread of the reward", names.of({"reward/std": "standard deviation"}), bottom=0,
        about="Without a spread there is nothing to learn from: groups whose rewards are equal have advantage 0.",
    )  # fmt: skip
    right_at = (config.get("evaluation") or {}).get("right_at", 1.0)
    accuracy = names.of({"accuracy/heldout": "greedy"}) + names.below("accuracy/")
    yield Chart(
        "accuracy", "Held-out accuracy", accuracy, dots=True, percent=True, bottom=0, top=1,
        about=f"Share of held-out problems that are answered right, with a reward of at least {right_at:g}.",
    )  # fmt: skip
    held_out = names.below("heldout_reward/")
    yield Chart("heldout_reward", "Held-out reward", held_out, dots=True, about="Mean reward of greedy attempts.")
    rewards = names.below("reward/", but=own)
    yield Chart("rewards", "Rewards, each by itself", rewards, about="Before their weights.")


def _updates(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    yield Chart("loss", "Loss", names.of({"actor/loss": "loss", "actor/pg_loss": "policy gradient"}))
    entropy = names.of({"actor/entropy": "entropy", "actor/kl": "KL to the reference"})
    yield Chart(
        "entropy", "Entropy and KL", entropy, "nats",
        about="Entropy that falls to 0 early: the policy explores no more. KL that grows without end: "
        "it leaves the reference.",
    )  # fmt: skip
    yield Chart(
        "grad_norm", "Gradient norm", names.of({"actor/grad_norm": "before clipping"}), bottom=0,
        about="Spikes point to single samples; trainer.optimizer.clip_norm bounds what they do.",
    )  # fmt: skip
    clipped = {"actor/clip_fraction": "ratio clipped", "actor/correction_capped_fraction": "correction capped"}
    yield Chart("clip", "Clipped tokens", names.of(clipped), percent=True, bottom=0)
    yield Chart("lr", "Learning rate", names.of({"actor/lr": "policy", "critic/lr": "critic"}), bottom=0)
    yield Chart("value_loss", "Critic: loss", names.of({"critic/value_loss": "value loss"}), bottom=0)
    explained = {"critic/explained_variance": "explained variance", "critic/value_clip_fraction": "clipped values"}
    yield Chart("critic", "Critic: what it explains of the returns", names.of(explained), percent=True, top=1)


def _lengths(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    lengths = names.banded("response_length/mean", "mean", "response_length/p10", "response_length/p90")
    lengths += names.of({"response_length/p50": "median", "response_length/max": "max"})
    about = "The band has four fifths of the responses." if any(curve.low for curve in lengths) else ""
    yield Chart("response_length", "Response length", lengths, "tokens", about, bottom=0)
    cut = names.of({"response_length/clip_ratio": "ended at max_tokens"})
    yield Chart(
        "clip_ratio", "Responses that were cut off", cut, percent=True, bottom=0,
        about="A share that grows towards 1: responses run to the limit, and are scored unfinished.",
    )  # fmt: skip
    yield Chart(
        "length_bias", "Length bias", names.of({"length_bias": "trained against generated"}), percent=True,
        about="How much longer than the generated responses the trained ones are.",
    )  # fmt: skip
    yield Chart("turns", "Turns of an attempt", names.of({"turns/mean": "mean", "turns/max": "max"}), bottom=0)


def _staleness(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    curves = names.of({"staleness/max": "max"})
    curves += names.banded("staleness/mean", "mean", "staleness/p10", "staleness/p90")
    curves += names.of({"staleness/p50": "median sample"})
    yield Chart(
        "staleness", "Staleness of trained tokens", curves, "versions", bottom=0,
        bound=_bound(config.get("max_staleness")),
        about="The dashed line is max_staleness; no token is ever above it. The band has four fifths of the samples.",
    )  # fmt: skip
    yield Chart("staleness_tokens", "Samples by their staleness", names.below("staleness/"), bottom=0)


def _mismatch(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    curves = names.of({"mismatch/logprob_abs_max": "max", "mismatch/logprob_abs_mean": "mean"})
    yield Chart(
        "mismatch", "Trainer against engine", curves, "|Δ log p|", log=True,
        about="On tokens of the trainer's version, before the update. 1e-6 is float32; what grows with the steps is a "
        "fault.",
    )  # fmt: skip
    yield Chart("mismatch_kl", "KL between engine and trainer", names.below("mismatch/"), "nats")
    yield Chart(
        "lag", "How far the policy has moved since sampling", names.below("lag/"), log=True,
        about="The same on older tokens; @k: k versions older.",
    )  # fmt: skip
    yield Chart("correction", "Weight of the correction", names.of({"actor/correction_weight_mean": "mean"}))


def _time(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    whole = names.of({"timing_s/step": "step"})
    phases = names.below("timing_s/", but=[f"timing_s/{name}" for name in PHASES_OF_OTHERS])
    yield Chart(
        "time_by_phase", "Time by phase", phases, "s", stacked=True, bottom=0,
        about="Phases overlap when max_staleness > 0, so they need not add up to the step.",
    )  # fmt: skip
    yield Chart("step_time", "Time of a step", whole, "s", bottom=0)
    samples = names.of({"perf/samples_per_s": "samples/s"})
    yield Chart("throughput", "Throughput", samples, "samples/s", "Trained samples by wall time.", bottom=0)
    yield Chart("tokens", "Response tokens", names.of({"perf/tokens_per_s": "tokens/s"}), "tokens/s", bottom=0)
    yield Chart(
        "idle", "Idle share of the step", names.below("idle/"), percent=True, bottom=0, top=1,
        about="Who waits for the others. Engines idle: raise max_staleness. Ranks idle: more engines.",
    )  # fmt: skip
    accepted = names.of({"rollout/speculation_acceptance": "accepted"})
    yield Chart(
        "speculation", "Drafted tokens that were accepted", accepted, percent=True, bottom=0, top=1,
        about="Where too few are for drafts to pay, an engine begins again without them (rollout.speculation).",
    )  # fmt: skip
    forward = {"ranks/forward_s_slowest": "slowest rank", "ranks/forward_s_others": "median of the others"}
    yield Chart("ranks", "Forward passes, by rank", names.of(forward), "s", bottom=0)
    padding = names.of({"actor/padding_share": "policy", "critic/padding_share": "critic"})
    yield Chart(
        "padding", "Padding", padding, percent=True, bottom=0, top=1,
        about="Of the tokens that micro-batches have room for, those that pad shorter rows.",
    )  # fmt: skip
    shared = names.of({"actor/shared_share": "policy", "critic/shared_share": "critic"})
    yield Chart(
        "shared", "Shared beginnings", shared, percent=True, bottom=0, top=1,
        about="Of the tokens of all sequences, those that are computed with another of their group.",
    )  # fmt: skip
    yield Chart("checkpoint_time", "Time of a checkpoint", names.of({"timing_s/checkpoint": "write"}), "s", bottom=0)


def _store(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    rows = {"store/rows": "rows", "store/groups": "groups", "store/active_groups": "groups under way"}
    yield Chart("store_rows", "Rows in the store", names.of(rows), bottom=0)
    held = {"store/bytes": "values", "store/shared_bytes": "shared memory", "store/spilled_bytes": "spilled"}
    yield Chart("store_bytes", "Bytes in the store", names.of(held), "bytes", bottom=0)
    waiting = {"store/waiting_producers": "producers", "store/waiting_consumers": "consumers"}
    yield Chart("store_waiting", "Who waits at the store", names.of(waiting), bottom=0)
    yield Chart("store_ready", "Rows that are ready, by stage", names.below("store/ready/"), bottom=0)
    yield Chart("store_wait_s", "Wait for rows, by stage", names.below("store/wait_s/"), "s", bottom=0)
    yield Chart(
        "dropped", "Dropped rows, by reason", names.below("dropped/", "lost/", "ignored/"), bottom=0,
        about="Since the start. Nothing is dropped without a reason.",
    )  # fmt: skip


def _weights(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    yield Chart("weights", "Weights", names.below("weights/"))
    yield Chart("checkpoint", "Checkpoints that failed", names.of({"checkpoint/failed": "failed"}), bottom=0)


def _environment(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    attempts = names.below("environment/attempts_", "environment/truncated_by_")
    yield Chart("attempts", "Attempts by outcome", attempts, bottom=0)
    yield Chart(
        "tools", "Tools", names.below("environment/tools", "environment/calls"), bottom=0,
        about="Calls that were carried out, and what went wrong with them.",
    )  # fmt: skip
    yield Chart("environment", "Turns, and others", names.below("environment/"), bottom=0)


def _faults(names: _Names, config: Mapping[str, Any]) -> Iterable[Chart]:
    yield Chart(
        "effective_time", "Effective training time", names.of({"faults/effective_time": "share"}), percent=True, top=1,
        about="The share of the time since the first step that faults have left.",
    )  # fmt: skip
    yield Chart("faults", "Members lost", names.below("faults/"), bottom=0)
    yield Chart("stragglers", "Stragglers", names.below("stragglers/"), bottom=0)
    members = names.of({"rollout/num_engines": "engines", "reward/num_workers": "reward workers"})
    yield Chart("members", "Members that are there", members, bottom=0)
    yield Chart("groups", "Groups by engine", names.below("rollout/groups"), bottom=0)
    yield Chart("recording", "Lines that could not be written", names.below("recording/"), bottom=0)


_MAKERS: Mapping[str, tuple[Callable[[_Names, Mapping[str, Any]], Iterable[Chart]], ...]] = {
    "learning": (_rewards, _updates), "lengths": (_lengths,), "staleness": (_staleness,), "mismatch": (_mismatch,),
    "time": (_time,), "store": (_store,), "weights": (_weights,), "environment": (_environment,), "faults": (_faults,),
}  # fmt: skip
"""Functions that make the charts of a theme, by theme."""


def _file(prefix: str) -> str:
    return prefix.replace("/", "_")


def _bound(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
