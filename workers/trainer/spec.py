"""What a rank is made from. Plain data, so that it crosses Ray; light to import, since whoever starts a run imports
it."""

from dataclasses import dataclass, field

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import WeightsConfig
from penstock.metering.ray_export import Origin
from penstock.workers.protocols import Loss


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Of every rank, whether it trains or scores."""

    name: str
    """Of the actor."""
    config: TrainerConfig
    model_path: str
    rank: int = 0
    num_ranks: int = 1
    num_threads: int = 0
    """Of torch; 0 leaves it."""
    stage: str
    head: str = "policy"
    """policy, or scores: a reward model."""
    temperature: float = 1.0
    """Of the sampling distribution."""
    attention: str = "sdpa"
    engine_dtype: str = "float32"
    origin: Origin | None = None
    """Of what the rank measures; None: that goes nowhere."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(RankSpec):
    """Of a rank that trains."""

    loss: Loss
    in_trainer: tuple[Stage, ...] = ()
    """Stages that run on the batch before the update."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Of the dataflow, for these."""
    is_saved: bool = False
    """Checkpoints of it are taken."""
    checkpoint_timeout_s: float = 1800.0
    keeps_state: str | None = None
    """Directory in shared memory below which every rank keeps a copy of its state after each update, the same on all
    nodes (`kept/`). None: no copies."""
    after_step: int = 0
    """The last step before the run's actors were started: 0, or the checkpoint's."""
    phase_timeout_s: float = WeightsConfig.phase_timeout_s
    """Of each phase of a weight sync."""
    leaves_out_beyond: int | None = None
    """Turns with a token that is staler than so many versions become context; None: there are none."""


@dataclass(frozen=True, kw_only=True)
class ScorerSpec(RankSpec):
    """Of a rank that only computes: a reference, a teacher, a reward model."""

    column: str
    """What it writes."""
    rows_alone: bool = False
    """Each row is computed alone, so that its values do not depend on which others were ready with it."""
