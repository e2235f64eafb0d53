"""What the simulator and the closed form ask of a cost model: seconds of each thing that a run does, for one plan.

    an engine   prefill, then one decode step after another of all sequences that it has
    a rank      the update of its share of a batch
    weights     published while engines generate on, loaded while an engine pauses
    others      rewards and scorers, by their stage

Seconds come from kernels' times (`cost_model.py`), from what a run has recorded (`processors.py`), or from constants:
for a run before there is a cost model of it, and for checks of the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.values import read_yaml


@dataclass(frozen=True)
class SyncSeconds:
    """Seconds of one weight sync."""

    published_s: float
    """From the end of the update until the version is sealed. A synchronous run waits for it."""
    paused_s: float
    """Pause of an engine, which loads the version."""
    critical_s: float = 0.0
    """The part of `published_s` that the next step waits for, where `max_staleness` is above 0."""


class Durations(Protocol):
    """Seconds of one plan's actors. Each is of one engine or one rank: a tensor-parallel engine is one."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which an engine reads `tokens` tokens of prompts, and decodes nothing."""

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of one decode step: one token of each sequence. `context`: mean number of tokens before it."""

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        """Seconds of an update by all ranks, its optimizer steps included. `lengths`: tokens, prompt included, of each
        rank's rows; the slowest rank decides."""

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        """Seconds that one actor of another stage takes for rows with `tokens` tokens in all."""

    def sync(self) -> SyncSeconds:
        """Seconds of a weight sync."""

    def turn_s(self) -> float:
        """Seconds that a change of turns takes where engines and ranks share their devices; 0 where they do not."""


@dataclass(frozen=True)
class ConstantDurations:
    """Seconds by constants; implements `Durations`. In a file (`penstock simulate --durations FILE`):

    prefill_tokens_per_s: 40000        # of an engine
    decode: {1: 0.0062, 32: 0.0096, 256: 0.0302}   # seconds of a decode step, by number of sequences
    update_tokens_per_s: 12000         # of a rank, forward and backward
    sync: {published_s: 2.0, paused_s: 0.4, critical_s: 0.5}
    stages: {reward: 0.001}            # seconds a row of an actor of a stage
    turn_s: 0.0                        # of a change of turns, placement=colocated
    """

    prefill_tokens_per_s: float = 40_000.0
    decode: Mapping[int, float] = field(default_factory=lambda: {1: 0.01, 256: 0.03})
    """Seconds of a decode step by number of sequences. Between two numbers it grows evenly, beyond the last as between
    the last two."""
    context_s: float = 0.0
    """Seconds that each token of context adds to a decode step, of each sequence."""
    update_tokens_per_s: float = 10_000.0
    update_s_more: float = 0.0
    """Seconds of an update whatever its tokens: the optimizer, collectives."""
    synced: SyncSeconds = field(default_factory=lambda: SyncSeconds(0.0, 0.0, 0.0))
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds a row, by stage. None of those that are not named."""
    turn: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.prefill_tokens_per_s, self.update_tokens_per_s, *self.decode]
        times = [*self.decode.values(), *self.stages.values(), self.context_s, self.update_s_more, self.turn,
                 *vars(self.synced).values()]  # fmt: skip
        if not self.decode or any(number <= 0 for number in numbers) or any(seconds < 0 for seconds in times):
            raise ConfigError(f"durations: rates and numbers of sequences must be above 0, seconds not below: {self}")
        object.__setattr__(self, "_points", sorted(self.decode.items()))
        object.__setattr__(self, "_known", {})

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def decode_s(self, num_sequences: float, context: float) -> float:
        known: dict[float, float] = self._known  # type: ignore[attr-defined]
        seconds = known.get(num_sequences)
        if seconds is None:
            seconds = known[num_sequences] = interpolated(self._points, num_sequences)  # type: ignore[attr-defined]
        return seconds + self.context_s * context * num_sequences

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return self.update_s_more + max(map(sum, lengths), default=0) / self.update_tokens_per_s

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return self.stages.get(stage, 0.0) * num_rows

    def sync(self) -> SyncSeconds:
        return self.synced

    def turn_s(self) -> float:
        return self.turn

    @classmethod
    def read(cls, file: str | Path) -> "ConstantDurations":
        """Read a file. Raises `ConfigError`."""
        try:
            values = read_yaml(Path(file))
        except OSError as error:
            raise ConfigError(f"--durations {file}: cannot be read: {error}") from None
        return cls.of(values if isinstance(values, Mapping) else {"": values}, f"--durations {file}")

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> "ConstantDurations":
        """Make durations of plain data. `where`: it comes from there, for messages."""
        names = {"sync": "synced", "turn_s": "turn"}
        known = {field.name for field in fields(cls)} - set(names.values()) | set(names)
        if unknown := [str(name) for name in values if name not in known]:
            raise ConfigError(f"{where}: {', '.join(unknown)}: unknown. There are {', '.join(sorted(known))}.")
        try:
            found: dict[str, Any] = {names.get(name, name): value for name, value in values.items()}
            if "synced" in found:
                found["synced"] = SyncSeconds(**{name: float(value) for name, value in found["synced"].items()})
            for name in {"decode", "stages"} & found.keys():
                key = int if name == "decode" else str
                found[name] = {key(one): float(seconds) for one, seconds in found[name].items()}
            for name in found.keys() - {"synced", "decode", "stages"}:
                found[name] = float(found[name])
            return cls(**found)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: {error}. See docs/planning.md for what each is.") from None


def interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """The value at a place between points that ascend, or beyond the last by the slope before it.

    >>> interpolated([(1, 1.0), (3, 2.0)], 2), interpolated([(1, 1.0), (3, 2.0)], 5)
    (1.5, 3.0)
    """
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    before, after = next((pair for pair in pairwise(points) if at <= pair[1][0]), (points[-2], points[-1]))
    share = (at - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
