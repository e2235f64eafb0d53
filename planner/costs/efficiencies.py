"""Shares of the rates on paper that are attained, and times that no rate explains. They are common to all plans: a
wrong one changes seconds more than it changes the order of plans.

Fitted to the rows of `benchmarks/planner/published.yaml` (docs/planning.md says how far they are right), but for those
of kernels, which are from tables of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiencies:
    """Factors of the cost model."""

    bandwidth: float = 0.82
    """Share of a GPU's bandwidth at which decoding reads weights, keys and values."""
    prefill: float = 0.63
    """Share of a GPU's FLOPs at which prompts are read."""
    training: float = 0.49
    """Share of a GPU's FLOPs in forward and backward of long micro-batches."""
    training_mixture: float = 0.22
    """The same of a mixture's experts, whose products are many and small."""
    link: float = 0.75
    """Share of a link's rate in collectives."""
    collective_s: float = 15e-6
    """Seconds of a collective of few bytes between GPUs of a node."""
    decode_s: float = 0.35e-3
    """Seconds of a decode step beside its layers: the head's kernels and sampling on the GPU."""
    schedule_s: float = 2.0e-3
    """Seconds of a decode step in which the engine's scheduler prepares it."""
    sequence_s: float = 8e-6
    """Seconds of a decode step for each of its sequences: their records in Python."""
    layer_s: float = 1.2e-3
    """Seconds of one layer's forward and backward beside its products: kernels' launches, hooks of FSDP."""
    layer_mixture_s: float = 13.3e-3
    """The same of a layer with experts: tokens are sorted, exchanged, and put back."""
    update_s: float = 1.05
    """Seconds of an update beside all this: collating, metrics, the optimizer's launches."""
    host_optimizer: float = 25e9
    """Bytes a second at which an optimizer on the host reads and writes its states, a rank."""
    decode_factor: float = 1.36
    """Seconds of an engine in steps of RL over those of its kernels, by measured tables where there are any, and its
    scheduler; serving alone says 1.0, and a run says its own (`calibration.py`)."""
    update_factor: float = 1.0
    """Measured seconds of ranks over these, where a run says so."""
    overlap: float = 0.7
    """Share of FSDP's collectives that goes on while the GPU computes, where there is enough to compute."""
