"""How the policy is updated."""

from dataclasses import dataclass, field

from penstock.conf.checks import above, at_least, one_of, within

SCHEDULES = ("constant", "cosine")


@dataclass
class OptimizerConfig:
    """AdamW (1711.05101)."""

    lr: float = 1e-6
    """Peak learning rate. 1e-6 suits models of 1B and more; tiny ones want 1e-4."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down. 0: never."""
    schedule: str = "constant"
    """constant, or cosine (to min_lr_share of the peak at trainer.max_steps)."""
    warmup_steps: int = 0
    """Linear from 0 to the peak."""
    min_lr_share: float = 0.1

    def __post_init__(self) -> None:
        at_least("trainer.optimizer.lr", self.lr, 0)
        at_least("trainer.optimizer.clip_norm", self.clip_norm, 0)
        at_least("trainer.optimizer.warmup_steps", self.warmup_steps, 0)
        within("trainer.optimizer.min_lr_share", self.min_lr_share, 0, 1)
        one_of("trainer.optimizer.schedule", self.schedule, SCHEDULES)


@dataclass
class TrainerConfig:
    engine: str = "fsdp"
    """fsdp (FSDP2, `fully_shard`)."""
    num_ranks: int = 1
    """Trainer actors, one a rank."""
    num_gpus_per_rank: float = 0
    """1 on a GPU cluster (nccl); 0 on CPUs (gloo)."""
    max_steps: int = 100
    """Policy updates in this run."""
    groups_per_step: int = 8
    """Groups (prompts) that one update trains on; samples = groups_per_step x algorithm.group_size."""
    num_minibatches: int = 1
    """Optimizer steps per update, each on its share of the batch. Above 1 the ratio is taken against the batch's
    start."""
    max_tokens_per_microbatch: int = 8192
    """Token budget of one forward-backward, padding included. Bounds activation memory; changes no result."""
    dtype: str = "float32"
    """Compute dtype: float32 or bfloat16. Master weights and optimizer are float32 either way."""
    activation_checkpointing: bool = False
    """Recompute each layer in backward: less memory, about a third more time."""
    logprob_chunk_mib: float = 128.0
    """Memory for logits and what is made of them, MiB. Those of a micro-batch that fit whole are kept for backward;
    others are made tile by tile, and again in backward. Bounds memory at large vocabularies; changes no result but for
    rounding.
    """
    num_threads: int = 0
    """CPU threads of each rank. 0: all cores when max_staleness=0, else an even share."""
    collective_timeout_s: float = 600.0
    step_timeout_s: float = 3600.0
    """Deadline of one update, waiting for its samples included."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Of the critic, where the algorithm has one. Its head is new, so that it wants a higher rate than the policy."""

    def __post_init__(self) -> None:
        one_of("trainer.engine", self.engine, ("fsdp",))
        one_of("trainer.dtype", self.dtype, ("float32", "bfloat16"))
        for key in ("num_ranks", "max_steps", "groups_per_step", "num_minibatches", "max_tokens_per_microbatch"):
            at_least(f"trainer.{key}", getattr(self, key), 1)
        for key in ("logprob_chunk_mib", "collective_timeout_s", "step_timeout_s"):
            above(f"trainer.{key}", getattr(self, key), 0)
