"""Seconds of a run on CPUs, whose engines and ranks share the cores of one machine.

    alone      what is done takes a number of processor seconds, and T threads share the part of it that can be shared
    together   members ask for more cores than there are: all of them slow down in proportion

So the order of what happens is that of a machine with as many cores as are asked for, and time goes slower: the
simulator plays the run as if nobody were in the way, and counts each second as many times as cores are missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.threads import threads_per_worker
from penstock.planner.durations import Sync

ENGINE_GAINS: Mapping[int, float] = {1: 1.0, 2: 0.6}
"""How many times as fast an engine is with so many threads, where no trial of the run says (`threads.json`): the hf
engine and a model of 3M parameters, whose threads sleep and wake for operations that are shorter than that."""
RANK_GAINS: Mapping[int, float] = {1: 1.0, 2: 1.04}
"""The same of a rank."""
RANK_ASKS = 0.7
"""Cores that a rank asks for in the mean for each thread beside its first. Those of such an engine ask for none."""
EXCHANGES = 12.0
"""Seconds in which two ranks exchange weights and gradients in an update, for each that a publication takes: both are
of all weights, through sockets instead of shared memory."""
OTHERS = 0.2
"""Processor seconds of store, rewards, driver and Ray, and what crowded caches cost, for each of engines and ranks."""


def gain(gains: Mapping[int, float], threads: int) -> float:
    """How many times as fast so many threads are as one: of the largest number up to it that is known.

    >>> gain({1: 1.0, 2: 1.7}, 3)
    1.7
    """
    return gains[max((count for count in gains if count <= threads), default=min(gains))]


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
    """Seconds of a decode step, whatever its sequences."""
    sequence_s: float
    """Seconds of a decode step for each of its sequences."""
    group_s: float
    """Seconds of a group, beside its decode steps: its lease, its prompt, its way back."""
    token_s: float
    """Seconds of an update by one rank, for each token."""
    update_s: float
    """Seconds of an update, whatever its tokens: the optimizer, the copy of the state."""
    published_s: float
    paused_s: float
    scored_s: float
    """From the end of a batch's last group until the update begins: rewards, advantages, the forming of the batch."""
    between_s: float
    """Seconds of a step between its phases, in which the controller's calls go around."""
    engine_gains: Mapping[int, float] = field(default_factory=lambda: ENGINE_GAINS)
    rank_gains: Mapping[int, float] = field(default_factory=lambda: RANK_GAINS)

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
        return Cores(self.num_cores, 1.0, 1 + RANK_ASKS * (self._threads("trainer") - 1))

    def prefill_s(self, tokens: int) -> float:
        return self.costs.group_s * tokens / self.prompt

    def decode_s(self, num_sequences: float, context: float) -> float:
        return (self.costs.decode_s + num_sequences * self.costs.sequence_s) / self.engine_gain

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        tokens = max(map(sum, lengths), default=0)
        return (self.costs.update_s + self.costs.token_s * tokens) / self.rank_gain + self.exchanged_s

    @property
    def exchanged_s(self) -> float:
        """Seconds of an update in which ranks exchange weights and gradients, by rings."""
        ranks = self.config.trainer.num_ranks
        return EXCHANGES * self.costs.published_s * 2 * (ranks - 1) / ranks

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return self.costs.scored_s if stage == self.first_stage else 0.0

    def sync(self) -> Sync:
        waited = self.costs.between_s + self.costs.published_s
        return Sync(waited, self.costs.paused_s, waited)

    def turn_s(self) -> float:
        return 0.0

    @property
    def engine_gain(self) -> float:
        return gain(self.costs.engine_gains, self._threads("rollout"))

    @property
    def rank_gain(self) -> float:
        return gain(self.costs.rank_gains, self._threads("trainer"))

    def _threads(self, role: str) -> int:
        config = self.config
        return threads_per_worker(role, config, self.num_cores, config.rollout.least_workers, config.trainer.num_ranks)
