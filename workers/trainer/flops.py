"""Floating-point operations that an update takes, and that a device could do. Pure.

A token costs 6 for each parameter, 2 forward and 4 backward (Kaplan et al., 2001.08361), and its attention 12 l h q t
more, of l layers whose heads have h q together, in a sequence of t tokens (PaLM, 2204.02311, appendix B). With adapters
the backward pass makes no gradients of the other weights: 4 for each parameter. What is computed a second time, as with
checkpointed activations, does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

PEAKS = {"H200": 989e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Peak FLOP/s of dense bf16 with fp32 accumulation, as the vendor says, by a word of the device's name."""
SLOWER = {"PCIe", "NVL"}
"""Words in the names of boards whose peak is another."""


@dataclass(frozen=True)
class ModelSize:
    num_parameters: int
    num_layers: int
    width: int
    """Width of all heads of a layer together."""
    has_adapters: bool = False
    """True if adapters alone are trained."""

    def update_flops(self, sequence_lengths: Iterable[int]) -> float:
        """FLOPs of an update on sequences of these lengths, in tokens.

        >>> ModelSize(num_parameters=1000, num_layers=2, width=10).update_flops([4])
        27840.0
        """
        of_weights, of_attention = (
            (4 if self.has_adapters else 6) * self.num_parameters,
            12 * self.num_layers * self.width,
        )
        return float(sum(length * (of_weights + of_attention * length) for length in sequence_lengths))


def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of a device, by its name; None for an unknown one.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    words = set(device.replace("-", " ").split())
    return next((peak for name, peak in PEAKS.items() if name in words), None) if not words & SLOWER else None
