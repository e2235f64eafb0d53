"""Compares two runs bit for bit, by the hashes in their steps' lines (`workers/trainer/row_hashes.py`).

    lines of a run, lines of another ─▶ first_difference ─▶ the step, and the quantity that differs first

Quantities follow from one another in the order of `QUANTITIES`, so the first one that differs is where to look: with
the same tokens and other rewards, it is the reward function.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.orchestrator.observability.manifest import FILE, manifest_differences, read_manifest
from penstock.orchestrator.observability.reporting.metrics import HASH
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.trainer.row_hashes import QUANTITIES

Line = Mapping[str, Any]
NAMES = {"logprobs": "log-probabilities"}
"""Names of quantities for people, where they differ."""
CAUSES = {
    "prompts": "the rows of the data, their order, or the tokenizer and its template",
    "tokens": "the engine: its starting weights, seeds, threads or kernels; or what an environment said",
    "logprobs": "the engine's or a scorer's weights, threads or kernels",
    "rewards": "the reward: its code, its data, or what it asks elsewhere",
    "advantages": "the algorithm's settings or code",
    "gradients": "the ranks' starting weights, threads, micro-batches or kernels; or the loss",
    "weights": "the optimizer",
}
"""Where to look for the cause of a quantity that differs first."""
MOST_VALUE = 60
"""Largest number of characters of a value in a list of differences."""


@dataclass(frozen=True)
class Difference:
    step: int
    quantity: str
    """The first of `QUANTITIES` that differs in this step."""

    @property
    def name(self) -> str:
        """The quantity's name for people."""
        return NAMES.get(self.quantity, self.quantity)

    def text(self) -> str:
        return f"step {self.step} is the first that differs, in its {self.name}. Look at {CAUSES[self.quantity]}."


def difference_in(before: Line, now: Line) -> Difference | None:
    """The first quantity that differs between two lines of a step; one that a line lacks is not compared."""
    for quantity in QUANTITIES:
        found = [line.get(f"{HASH}{quantity}") for line in (before, now)]
        if None not in found and found[0] != found[1]:
            return Difference(int(now["step"]), quantity)
    return None


def hashed_lines(directory: RunDirectory) -> dict[int, Line]:
    """The lines of a run that have hashes, by step; the last one of a step counts. Raises `ConfigError` where none
    has."""
    lines = directory.read_metrics()
    found: dict[int, Line] = {line["step"]: line for line in lines if any(name.startswith(HASH) for name in line)}
    if not found:
        raise ConfigError(
            f"{directory.place}: no step has hashes in metrics.jsonl. It has made none yet, or is a run of a version "
            "of Penstock that wrote none."
        )
    return found


def compare(before: Mapping[int, Line], now: Mapping[int, Line]) -> tuple[int, Difference | None]:
    """The last step up to which all steps of both have the same bits, and the first difference. 0: no step was
    compared. Raises `ConfigError` where they have no step in common."""
    common = sorted(before.keys() & now.keys())
    if not common:
        raise ConfigError(
            f"no step is in both runs: one has steps {min(before)} to {max(before)}, the other {min(now)} to "
            f"{max(now)}."
        )
    same = 0
    for step in common:
        if (found := difference_in(before[step], now[step])) is not None:
            return same, found
        same = step
    return same, None


def verdict(same: int, difference: Difference | None) -> str:
    """The outcome of a comparison in a sentence or two."""
    same_text = f"the same bits up to step {same}" if same else ""
    if difference is None:
        return same_text or "no step was compared"
    return f"{same_text}; {difference.text()}" if same_text else difference.text()


def loose_ends(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a run with this configuration may have other bits when it is made again, a sentence each; none where
    promise 4 of docs/internals/architecture.md holds."""
    rollout, trainer = (dict(config.get(name) or {}) for name in ("rollout", "trainer"))
    if config.get("max_staleness"):
        yield (
            f"max_staleness={config['max_staleness']}: which version samples a token depends on timing. With "
            "max_staleness=0 it does not."
        )
    if rollout.get("engine") == "vllm":
        yield (
            "rollout.engine=vllm computes together what is ready at the same time, and its rounding depends on that, "
            "so a token may be another one from step 1 on. rollout.engine=hf samples each group alone."
        )
    if not dict(rollout.get("sampling") or {}).get("seeded", True):
        yield "rollout.sampling.seeded=false: what is sampled depends on who samples it."
    if rollout.get("num_gpus_per_worker") or trainer.get("num_gpus_per_rank"):
        yield "on GPUs no run has been seen to have the same bits twice: kernels may add in another order."


def listed(found: Mapping[str, Mapping[str, Any]], skipped: Sequence[str] = ()) -> list[str]:
    """Lines for what differs between manifests, without keys that begin with one of `skipped`."""
    rows = {key: row for key, row in found.items() if not key.startswith(tuple(skipped))}
    return [f"  {key}: {' | '.join(_short(value) for value in row.values())}" for key, row in rows.items()]


def differences_text(before: Path, now: Path, skipped: Sequence[str] = ()) -> str:
    """What differs between the manifests of two runs, for people."""
    found = {"first": read_manifest(before), "second": read_manifest(now)}
    if missing := [str(run) for run, one in zip((before, now), found.values(), strict=True) if not one]:
        return f"{' and '.join(missing)}: no {FILE}, so nothing is known of what else differs"
    lines = listed(manifest_differences(found), skipped)
    return "\n".join(["their manifests differ:", *lines] if lines else ["their manifests are the same"])


def _short(value: Any) -> str:
    text = "absent" if value is None else json_of(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 1]}…"
