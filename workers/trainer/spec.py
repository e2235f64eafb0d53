"""What a trainer's rank is made from. Plain data, so that it crosses Ray; light to import, since whoever starts a run
imports it."""

from dataclasses import dataclass, field

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import Loss


@dataclass(frozen=True)
class TrainerSpec:
    name: str
    config: TrainerConfig
    model_path: str
    rank: int
    num_ranks: int
    num_threads: int
    stage: str
    loss: Loss | None
    """None: a scorer, without optimizer."""
    temperature: float = 1.0
    attention: str = "sdpa"
    engine_dtype: str = "float32"
    column: str = "reference_logprobs"
    """What a scorer writes."""
    in_trainer: tuple[Stage, ...] = ()
    """Stages that run on the batch before the update."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Of the dataflow, for these."""
    head: str = "policy"
    """policy, or scores: a reward model, trained or served."""
    checkpoint_timeout_s: float = 1800.0
    update_timeout_s: float = 120.0
    """Of each phase of a weight update."""
    is_saved: bool = False
    """Checkpoints of it are taken."""

    @property
    def trains(self) -> bool:
        return self.loss is not None
