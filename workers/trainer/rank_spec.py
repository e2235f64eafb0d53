"""The specification that a rank is made from. Plain data, so that it can be sent through Ray; light to import, since
the process that starts a run imports it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage, TrainedPolicy
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import WeightsConfig
from penstock.metering.ray_export import Origin


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The specification of a rank, whether it trains or scores."""

    name: str
    """Name of the actor."""
    config: TrainerConfig
    model_path: str
    rank: int = 0
    num_ranks: int = 1
    num_threads: int = 0
    """Number of torch's threads; 0 leaves it."""
    stage: str
    head: str = "policy"
    """Output of the model: policy, or scores for a reward model."""
    temperature: float = 1.0
    """Temperature of the sampling distribution."""
    attention: str = "sdpa"
    engine_dtype: str = "float32"
    expands_segments: bool = True
    """True if torch may enlarge its pieces of GPU memory. False where an engine maps the rank's memory by a handle
    (weights.transport=ipc), which such pieces do not have."""
    picture_digest: str | None = None
    """Digest of the processor of the run's pictures (`workers/pictures/`); None: the run is one of text."""
    origin: Origin | None = None
    """Origin of what the rank measures; None: measurements are not exported."""
    records_root: str | None = None
    """Directory of this node that NCCL's watchdog writes into what each rank called, before it ends one. None: torch's
    own."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(RankSpec):
    """The specification of a rank that trains."""

    policies: tuple[TrainedPolicy, ...]
    """Policies that it trains, each with its loss."""
    own_models: Mapping[str, str] = field(default_factory=dict)
    """Path of the model of each of several policies that are whole models; empty for all others."""
    in_trainer: tuple[Stage, ...] = ()
    """Stages that run on the batch before the update."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Columns of the dataflow, for `in_trainer`."""
    epochs_per_batch: int = 1
    """Passes of an update over its batch."""
    is_saved: bool = False
    """True if checkpoints of this trainer are taken."""
    checkpoint_timeout_s: float = 1800.0
    memory_checkpoint_root: str | None = None
    """Directory in shared memory below which every rank keeps a copy of its state after each update, the same on all
    nodes (`memory_checkpoint.py`). None: no copies."""
    keeps_beside: bool = False
    """True if the copy is made when `begin_keeping` asks for it, beside the next step; else it is part of the step."""
    after_step: int = 0
    """The last step before the run's actors were started: 0, or the checkpoint's."""
    phase_timeout_s: float = WeightsConfig.phase_timeout_s
    """Seconds that each phase of a weight sync may take."""
    slot_rank: int | None = None
    """Largest rank of adapters that take turns in the model (`adapters/`); `WHOLE`: whole models do. None: it has no
    slot, and is trained as `config` says."""
    max_staleness: int = 0
    """Largest staleness of a token, in versions."""
    publishes: bool = True
    """True if versions of its weights lie in shared memory, with checksums. False: each step's report has a hash of
    them."""
    keeps_caches: bool = False
    """True if engines sample on from old caches under new weights (`rollout.on_update=keep`)."""
    probes: bool = False
    """True if it reports a few rows of each step for engines to score again (`probe.py`)."""
    leaves_out_old: bool = False
    """True if turns with a staler token become context; else there are none."""


@dataclass(frozen=True, kw_only=True)
class ScorerSpec(RankSpec):
    """The specification of a rank that only computes: a reference, a teacher, a reward model."""

    columns: tuple[str, ...]
    """The columns that the rank writes: one, or three with candidates."""
    candidates: int = 0
    """See `Stage.candidates`."""
    rows_of: tuple[str, str] | None = None
    """See `Stage.rows_of`."""
    prompt: str = "prompt_ids"
    """The column that it reads in the prompt's place."""
    rows_alone: bool = False
    """True if each row is computed alone, so that its values do not depend on which others were ready with it."""
