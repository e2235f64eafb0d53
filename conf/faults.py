"""Faults: the reaction of a run to a process of it that dies or hangs, how soon it notices and how often it tries
again; and the checkpoints that it returns to.
"""

from dataclasses import dataclass

from penstock.conf.checks import AUTO, POSITIVE, check_bounds, one_of
from penstock.conf.errors import ConfigError

LONGEST_PAUSE_S = 60.0
"""Longest pause, in seconds, between a loss and the restart made for it. A node has mostly come back by then, or a full
disk was cleared; a longer pause would only cost time."""
KEPT_BESIDE = ("auto", "always", "never")
"""Values of faults.keep_beside."""


@dataclass
class FaultsConfig:
    """Limits of recovery. A member is an actor that works alone (an engine, a reward worker), or all ranks of a trainer
    or scorer. A lost one is restarted while the rest continues. If that does not help, the run returns to its last
    checkpoint within the same command; if that does not help either, it ends. Errors in data, settings or code are
    never retried. `penstock serve` has the same limits for its ranks and engines, and ends where a run returns."""

    max_restarts: int = 3
    """Restarts of one member within window_s; the next loss returns to the last checkpoint. A death by chance needs
    one, so three in ten minutes tell of a cause that stays. 0: the first death of any member returns to the last
    checkpoint, and with max_returns=0 ends the run."""
    window_s: float = 600.0
    """Seconds for which a restart or a return counts. Long enough for several starts of a large model."""
    pause_s: float = 1.0
    """Pause before a restart, in seconds. The first restart is made at once, since most deaths are single events; the
    second after this pause, and each further one after twice the last, 60 s at most. A member that is not lost for
    window_s begins anew."""
    max_returns: int = 2
    """Returns to the last checkpoint within window_s, or without getting past the step at which the last one was made;
    the next one ends the run. Each costs the steps since the checkpoint and a start of everything. 0: never return."""
    heartbeat_s: float = 10.0
    """Seconds between two heartbeats, which ask each member for its progress: often enough to notice a hang within a
    minute or two, and seldom enough to cost nothing. With more than five hundred members the interval is up to twice as
    long, so that the controller asks fifty a second."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a member that answers no heartbeat counts as lost, and is killed. Raise it where one call of
    C code holds Python's lock for longer, or while you debug."""
    lease_s: float = 300.0
    """Seconds for which the run's actors live on, on a cluster, after the command that drives the run has died; the
    same command with resume=auto then continues with them, without losing a step. Until then they keep what they have
    reserved. 300: long enough for `--retries`, and for a person at the keyboard. 0: they end with the command, and the
    run resumes from its newest checkpoint."""
    preemption_s: float = 0.0
    """Seconds after SIGTERM for a run to end its step and take a checkpoint; then it ends as by Ctrl-C. Set it to a
    little less than your scheduler waits before it kills: 30 s in Kubernetes and Slurm unless you ask for more, 120 on
    AWS's spot machines, 3 for `ray job stop`. 0: it ends at once, since the scheduler does not say how long it
    waits."""
    stall_s: float = 300.0
    """Seconds after which an engine that has samples in flight and makes no token counts as lost. Far more than the
    longest prefill; loading weights is not counted."""
    store_snapshot_s: float = 60.0
    """Seconds between two snapshots of the store on its node's disk, apart from checkpoints, from which another store
    continues if its process is lost: what was sampled since, and not trained, is sampled again. 0: never, and all that
    was not trained is sampled again."""
    keep_state: bool | str = AUTO
    """True: each rank keeps a copy of weights, optimizer and counters of the last two steps in its node's shared
    memory, so that a lost trainer continues with the step that it was at. false: it returns to the last checkpoint.
    Costs twice the trainer's state in host memory, and the time to copy it once a step. auto: true, and false, said at
    the start, where a node has no memory for it; a run that asks for true is refused there."""

    keep_beside: str = "auto"
    """When that copy is made. always: beside the next step's forward and backward passes, which change no weight. A
    rank that is lost may then cost two steps: the one under way, and the one before, whose copies were not there yet.
    never: within the step, which ends with it. auto: beside where ranks have GPUs, since the way over PCIe would hold
    them up; on CPUs the copy takes the cores and the memory that the passes need. Has no effect with max_staleness=0:
    no next batch is there before the step counts."""

    partner_share: float = 0.1
    """Share of the run's time for copies on a second node. Where a run has several nodes, copies of the state
    (keep_state) also go to a second node after each step, so that a node with ranks that is lost costs one step at
    most, and no return to the last checkpoint. A step counts as trained once they are there; if they take more of the
    time than this, no more are made. 0.1: nodes are lost seldom, and returns to a checkpoint cost less than a tenth of
    the time on most clusters. 1: whatever they take. 0: none. Costs twice the trainer's state in the host memory of the
    second node, and the state's bytes on the link between both, once a step."""

    straggler_factor: float = 0.0
    """Multiple of the median time of a group. A group that an engine has had for longer is given to a second engine
    that waits for work; the first answer counts, and the other engine's is thrown away. 0: never, the default, since it
    pays only where engines differ in speed or hang, and samples of long responses are made twice otherwise. 3 is a good
    start for many engines with max_staleness > 0. With max_staleness=0 and engines that are not deterministic (vLLM)
    which answer is trained depends on time, so runs cannot be repeated exactly."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "faults",
            max_restarts=0, max_returns=0, store_snapshot_s=0, lease_s=0, preemption_s=0, window_s=POSITIVE,
            heartbeat_s=POSITIVE, heartbeat_timeout_s=POSITIVE, stall_s=POSITIVE, pause_s=(0, LONGEST_PAUSE_S),
            partner_share=(0, 1),
        )  # fmt: skip
        if self.straggler_factor and not self.straggler_factor > 1:
            raise ConfigError(
                f"faults.straggler_factor={self.straggler_factor}: half of all groups take longer than the median. "
                "Set it above 1, such as 3, or to 0 for off."
            )
        if isinstance(self.keep_state, str):
            one_of("faults.keep_state", self.keep_state, (AUTO,))
        one_of("faults.keep_beside", self.keep_beside, KEPT_BESIDE)
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            raise ConfigError(
                f"faults.heartbeat_timeout_s={self.heartbeat_timeout_s:g}: no answer can come in time, as members are "
                f"asked every faults.heartbeat_s={self.heartbeat_s:g} seconds. Set it to several times that."
            )


@dataclass
class CheckpointConfig:
    """Checkpoints: when a run is saved, how many are kept, and where. Training continues while one is written."""

    every_steps: int = 50
    """Steps between checkpoints; the last step has one, too. 0: never. A run that dies loses at most so many."""
    keep_last: int = 2
    """Number of the newest checkpoints that are kept: the previous one is there if the newest turns out damaged."""
    keep_every_steps: int = 0
    """Divisor of the steps whose checkpoints stay for good. 0: none does."""
    keep_best: int = 0
    """Number of the best checkpoints that stay, by best_metric. With it each evaluated step is saved, and removed once
    its score is known, unless it is among the best or kept by the keys above. `penstock export RUN DIRECTORY --best`
    writes the best model. 0: none stays for its score, since each costs the room of weights and optimizer."""
    best_metric: str = "accuracy/heldout"
    """Metric of the evaluation that says which checkpoint is best, e.g. accuracy/heldout_avg@8, accuracy/NAME of one of
    evaluation.sets, or POLICY/heldout_reward/heldout of one of several policies."""
    best_mode: str = "max"
    """Better values of best_metric: max: larger ones; min: smaller ones. Of equal values the earlier step is better."""
    directory: str | None = None
    """Place of the checkpoints: a directory that all nodes see, or an fsspec URL such as s3://bucket/run. `null`:
    `checkpoints/` of the run, at its URL if output_dir is one. What is written there is read back once before the
    checkpoint counts. No two runs may share one: a directory is locked against a second run, a URL cannot be."""
    timeout_s: float = 1800.0
    """Deadline of writing one, and of reading one."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "checkpoint", every_steps=0, keep_last=1, keep_every_steps=0, keep_best=0, timeout_s=POSITIVE
        )
        one_of("checkpoint.best_mode", self.best_mode, ("max", "min"))
