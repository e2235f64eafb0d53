"""Seconds of a run on CPUs, whose engines and ranks share the cores of one machine.

    alone      what is done takes a number of processor seconds, and T threads share the part of it that can be shared
    together   members ask for more cores than there are: all of them slow down in proportion

So the order of what happens is that of a machine with as many cores as are asked for, and time goes slower: the
simulator plays the run as if nobody were in the way, and counts each second as many times as cores are missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.threads import threads_per_worker
from penstock.orchestrator.planning.durations import Sync

ENGINE_SHARE = 0.0
"""Share of an engine's work that its threads divide, where no run says: a second thread gains an engine of a small
model nothing (docs/performance.md)."""
RANK_SHARE = 0.82
"""The same of a rank: two threads are 1.7 times as fast as one."""
OTHERS = 0.07
"""Processor seconds of store, rewards, driver and Ray for each of engines and ranks (docs/performance.md)."""


def speedup(threads: int, share: float) -> float:
    """How many times as fast several threads are, and how many cores they ask for in the mean, by Amdahl's law.
    `share`: of the work, that which they divide.

    >>> speedup(1, 0.8), round(speedup(2, 0.8), 3)
    (1.0, 1.667)
    """
    return 1 / (1 - share + share / threads)


@dataclass(frozen=True)
class Cores:
    """Cores of a machine, and how many of them each member asks for while it works."""

    there: float
    engine: float
    rank: float
    others: float = OTHERS
    """Cores that all other processes ask for, for each that engines and ranks do."""

    def pace(self, num_engines: int, num_ranks: int) -> float:
        """How many times as long everything takes while so many engines and ranks work: at least 1."""
        asked = (num_engines * self.engine + num_ranks * self.rank) * (1 + self.others)
        return max(1.0, asked / self.there)


@dataclass(frozen=True)
class ProcessorCosts:
    """Seconds on one thread, with nobody in the way."""

    decode_s: float
    """Of a decode step, whatever its sequences."""
    sequence_s: float
    """Of a decode step for each of its sequences."""
    group_s: float
    """Of a group, beside its decode steps: its lease, its prompt, its way back."""
    token_s: float
    """Of an update by one rank, for each token."""
    update_s: float
    """Of an update, whatever its tokens: the optimizer, the copy of the state."""
    published_s: float
    paused_s: float
    scored_s: float
    """From the end of a batch's last group until the update begins: rewards, advantages, the forming of the batch."""
    between_s: float
    """Of a step between its phases, in which the controller's calls go around."""
    engine_share: float = ENGINE_SHARE
    rank_share: float = RANK_SHARE

    def scaled(self, factor: float) -> "ProcessorCosts":
        """The same with all seconds so many times as long."""
        seconds = {name: factor * value for name, value in vars(self).items() if name.endswith("_s")}
        return replace(self, **seconds)


NOTHING = ProcessorCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ProcessorDurations:
    """Durations of one split of a machine with so many cores; implements `Durations`."""

    costs: ProcessorCosts
    config: RunConfig
    num_cores: int
    prompt: int
    """Mean tokens of a prompt."""
    first_stage: str = "reward"
    """The stage after the rollout: a batch waits for it and all that follows."""

    def cores(self) -> Cores:
        """Cores that engines and ranks ask for, so that the simulator knows who is in whose way."""
        return Cores(self.num_cores, self.engine_speedup, self.rank_speedup)

    def prefill_s(self, tokens: int) -> float:
        return self.costs.group_s * tokens / self.prompt

    def decode_s(self, num_sequences: float, context: float) -> float:
        return (self.costs.decode_s + num_sequences * self.costs.sequence_s) / self.engine_speedup

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        tokens = max(map(sum, lengths), default=0)
        return (self.costs.update_s + self.costs.token_s * tokens) / self.rank_speedup

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return self.costs.scored_s if stage == self.first_stage else 0.0

    def sync(self) -> Sync:
        waited = self.costs.between_s + self.costs.published_s
        return Sync(waited, self.costs.paused_s, waited)

    def turn_s(self) -> float:
        return 0.0

    @property
    def engine_speedup(self) -> float:
        return speedup(self._threads("rollout"), self.costs.engine_share)

    @property
    def rank_speedup(self) -> float:
        return speedup(self._threads("trainer"), self.costs.rank_share)

    def _threads(self, role: str) -> int:
        config = self.config
        return threads_per_worker(role, config, self.num_cores, config.rollout.least_workers, config.trainer.num_ranks)
