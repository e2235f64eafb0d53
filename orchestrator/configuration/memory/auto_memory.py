"""Values of keys that are `auto`, from what fits a GPU. Pure: no torch.

    rollout.gpu_memory_utilization     the engine's own GPU: most of it; one that it shares: what the rank leaves
    trainer.activation_checkpointing   only if a usual micro-batch does not fit without
    trainer.max_tokens_per_microbatch  the largest power of two that fits

What is chosen leaves `SPARE` of the GPU free, since figures are estimates and an allocator wastes some. On CPUs, and
where a GPU's memory is not known, nothing is chosen: keys have their defaults.
"""

import math
from dataclasses import replace
from typing import Any

from penstock.conf.checks import AUTO
from penstock.conf.run import RunConfig
from penstock.conf.trainer import DEFAULT_TOKENS
from penstock.conf.weights import shares_gpus
from penstock.orchestrator.configuration.memory.run_memory import PROCESS_BYTES, RunMemory

SPARE = 0.08
"""Share of a GPU that stays free."""
MOST_OF_GPU = 0.9
"""Largest share of a GPU of its own for an engine, which is vLLM's default."""
MOST_TOKENS, FEWEST_TOKENS = 32768, 1024
"""Bounds of a micro-batch's tokens: larger ones gain nothing, smaller ones leave a GPU idle."""


def with_chosen(memory: RunMemory) -> RunMemory:
    """The run with numbers in the place of what is `auto`."""
    if memory.gpu_bytes is None:
        return memory
    config = memory.config
    if config.rollout.gpu_memory_utilization == AUTO and config.rollout.num_gpus_per_worker:
        memory = _set(memory, "rollout", gpu_memory_utilization=_share(memory))
    if not config.trainer.num_gpus_per_rank:
        return memory
    if config.trainer.activation_checkpointing == AUTO:
        kept = _set(memory, "trainer", activation_checkpointing=False)
        usual = _tokens(kept, min(DEFAULT_TOKENS, kept.config.trainer.microbatch_tokens))
        keeps = (
            _fits(usual) and not config.trainer.activation_offload
        )  # of which layers' inputs alone are little to copy
        memory = kept if keeps else _set(memory, "trainer", activation_checkpointing=True)
    if config.trainer.max_tokens_per_microbatch == AUTO:
        memory = _largest(memory)
    return memory


def chosen(before: RunConfig, after: RunConfig) -> list[str]:
    """What was chosen, as on the command line."""
    pairs = (
        ("rollout.gpu_memory_utilization", before.rollout, after.rollout),
        ("trainer.activation_checkpointing", before.trainer, after.trainer),
        ("trainer.max_tokens_per_microbatch", before.trainer, after.trainer),
    )
    told = []
    for key, old, new in pairs:
        name = key.partition(".")[2]
        if getattr(old, name) != getattr(new, name):
            told.append(f"{key}={str(getattr(new, name)).lower()}")
    return told


def _largest(memory: RunMemory) -> RunMemory:
    """The run with the largest micro-batches that fit; with the smallest, if none does."""
    tokens = MOST_TOKENS
    while tokens > FEWEST_TOKENS and not _fits(_tokens(memory, tokens)):
        tokens //= 2
    return _tokens(memory, tokens)


def _share(memory: RunMemory) -> float:
    """The engine's share, in hundredths, rounded down."""
    assert memory.gpu_bytes is not None
    config = memory.config
    free = memory.gpu_bytes - PROCESS_BYTES
    if shares_gpus(config):
        free -= SPARE * memory.gpu_bytes + PROCESS_BYTES
        if config.placement == "colocated":  # the rank's weights are there when the engine starts and when it loads
            free -= memory.ranks["policy"].parts["weights"]
        else:
            free *= config.rollout.num_gpus_per_worker
    share = min(MOST_OF_GPU * min(1.0, _gpus(config)), free / memory.gpu_bytes)
    return max(0.01, math.floor(100 * share) / 100)


def _gpus(config: RunConfig) -> float:
    return 1.0 if shares_gpus(config) else config.rollout.num_gpus_per_worker


def _fits(memory: RunMemory) -> bool:
    assert memory.gpu_bytes is not None
    room = (1 - SPARE) * memory.gpu_bytes
    return all(peak <= room for what, peak in memory.peaks().items() if what != "engine")


def _tokens(memory: RunMemory, tokens: int) -> RunMemory:
    return _set(memory, "trainer", max_tokens_per_microbatch=tokens)


def _set(memory: RunMemory, section: str, **values: Any) -> RunMemory:
    """The run with these values in a section."""
    changed = replace(getattr(memory.config, section), **values)
    return replace(memory, config=replace(memory.config, **{section: changed}))
