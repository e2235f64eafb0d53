"""What each engine can do, by its name in the configuration. Everything else asks the record and never compares names,
so a new engine is one module and one entry here. Neither torch nor Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainerCapabilities:
    """Capabilities of an engine of the trainer (`trainer.engine`)."""

    implementation: str
    """Class that implements `TrainEngine`, as `module:class`. Imported when a rank starts."""
    splits_layers: bool
    """True if tensor and sequence parallelism work, and several copies of the model (`trainer.shard_size`)."""
    has_adapters: bool
    """True if it trains LoRA adapters."""
    takes_turns: bool
    """True if several adapters can take turns in its model (`workers/trainer/slot_trainer.py`)."""
    streams_shards: bool
    """True if its parameters are DTensors, which weights.transport=nccl_m2n sends shard by shard."""
    has_zero_stages: bool
    """True if `trainer.deepspeed.zero_stage` says what is spread over the ranks; otherwise everything is."""


TRAINERS: Mapping[str, TrainerCapabilities] = {
    "fsdp": TrainerCapabilities(
        implementation="penstock.workers.trainer.engines.fsdp:FsdpEngine",
        splits_layers=True,
        has_adapters=True,
        takes_turns=True,
        streams_shards=True,
        has_zero_stages=False,
    ),
    "deepspeed": TrainerCapabilities(
        implementation="penstock.workers.trainer.engines.deepspeed:DeepSpeedEngine",
        splits_layers=False,
        has_adapters=False,
        takes_turns=False,
        streams_shards=False,
        has_zero_stages=True,
    ),
}
"""The engines of the trainer by name."""


@dataclass(frozen=True, kw_only=True)
class RolloutCapabilities:
    """Capabilities of an engine for rollouts (`rollout.engine`). The defaults are those of a new engine: it samples
    from the model, and does nothing that the other fields name."""

    implementation: str
    """Function that makes the engine from an `EngineSpec` and `Meters`, as `module:function`. Imported when an actor
    starts."""
    has_model: bool = True
    """True if it samples from `model.path`."""
    on_update: tuple[str, ...] = ("keep",)
    """What can become of sequences under way when weights change (`rollout.on_update`); the first is the default."""
    is_exact: bool = True
    """True if a group's responses depend on weights, prompt and seed alone, and on nothing that is decoded with it."""
    computes_in_actor: bool = True
    """True if torch computes in the actor's own process."""
    start_s: float = 0.0
    """Seconds that it usually takes to start, for the message that says so; 0: hardly any."""
    structure_options: Mapping[str, Any] | None = None
    """Options (`rollout.engine_options`) with which samples follow a JSON schema without extra whitespace. None: it
    takes no options, and its samples follow no structure."""
    record_experts_on: frozenset[str] = frozenset()
    """Devices, `cpu` or `gpu`, on which it records the experts of each token (`rollout.router_replay`)."""
    serves_adapters: bool = False
    """True if it has the methods of `AdapterEngine`: it samples from adapters by name."""
    speculates: bool = False
    """True if it can check drafted tokens (`rollout.speculation`)."""
    scores_beside: bool = False
    """True if its `sample` scores a prompt at once, beside the samples that it decodes."""
    lora_ranks: tuple[int, ...] = ()
    """Ranks that it can make room for; an adapter gets the next larger one. Empty: any."""
    receives_streams: bool = False
    """True if it has the methods of `ReceivingEngine`: weights come from GPU to GPU (`weights.transport`)."""
    changes_threads: bool = False
    """True if it has the method of `ThreadedEngine`: CPU threads can be changed while it serves."""
    discards_weights: bool = False
    """True if it keeps no weights while it sleeps, where a publication brings them again."""
    is_estimated: bool = False
    """True if its memory is known beforehand (`penstock validate`), and its speed (`penstock plan`)."""
    has_builds: bool = False
    """True if its package has kernels of one device: the build that is installed says which
    (`workers/runtime/builds.py`)."""
    cpu_head_sizes: tuple[int, ...] = ()
    """Sizes of attention heads that its kernels for CPUs have. Empty: any."""


ROLLOUT_ENGINES: Mapping[str, RolloutCapabilities] = {
    "vllm": RolloutCapabilities(
        implementation="penstock.workers.rollout.engine_vllm_adapters:make",
        on_update=("recompute", "keep", "finish"),
        is_exact=False,
        computes_in_actor=False,
        start_s=30,
        structure_options={"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
        record_experts_on=frozenset({"gpu"}),
        serves_adapters=True,
        speculates=True,
        scores_beside=True,
        lora_ranks=(8, 16, 32, 64, 128, 256, 320, 512),
        receives_streams=True,
        changes_threads=True,
        discards_weights=True,
        is_estimated=True,
        has_builds=True,
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    ),
    "hf": RolloutCapabilities(
        implementation="penstock.workers.rollout.engine_hf:make",
        record_experts_on=frozenset({"cpu", "gpu"}),
        serves_adapters=True,
    ),
    "scripted": RolloutCapabilities(
        implementation="penstock.workers.rollout.engine_scripted:make",
        has_model=False,
        on_update=("recompute", "keep", "finish"),
        computes_in_actor=False,
    ),
}
"""The engines for rollouts by name."""


def names_with(capability: str, engines: Mapping[str, object]) -> str:
    """The names of the engines that have a capability, for messages.

    >>> names_with("splits_layers", TRAINERS)
    'fsdp'
    """
    return " or ".join(name for name, one in engines.items() if getattr(one, capability))
