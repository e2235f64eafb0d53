"""A rank's measurements of each step, noted in `Meters`, and the floating-point operations (FLOPs) of an update.

A token costs 6 for each parameter, 2 forward and 4 backward (Kaplan et al., 2001.08361), and its attention 12 l h q t
more, of l layers whose heads have h q together, in a sequence of t tokens (PaLM, 2204.02311, appendix B). With adapters
the backward pass makes no gradients of the other weights: 4 for each parameter. What is computed a second time, as with
checkpointed activations, does not count. Of a mixture's experts only those count that a token is sent to.
"""

import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.data.rows import Rows
from penstock.workers.trainer.step_report import StepReport
from penstock.workers.trainer.update.sequences import context_column
from penstock.workers.weights.checkpoint_form import stacked_experts

SHARED = "actor/shared_share"
PASSES = ("forward", "backward", "optimizer")
"""Keys in `UpdateReport.seconds` of the phases that have a series each."""
WHOLE = "update"
"""Key in `UpdateReport.seconds` for the whole update: all others together."""
PEAKS = {"H200": 989e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Peak FLOP/s of dense bf16 with fp32 accumulation, as the vendor says, by a word of the device's name."""
SLOWER = {"PCIe", "NVL"}
"""Words in the names of boards whose peak is another."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that its FLOPs depend on."""

    num_parameters: int
    """Parameters that a token meets: of a mixture's experts, as many as one is sent to."""
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


def size_of(model: nn.Module, *, has_adapters: bool) -> ModelSize:
    """The size of a whole model, with or without its weights. `has_adapters`: they alone will be trained. Where its
    configuration does not say how wide the heads are, they are as wide as the hidden states. Where it does not say how
    many experts a token is sent to (`num_experts_per_tok`), all count."""
    config = getattr(getattr(model, "lm", model), "config", None)
    config = getattr(config, "text_config", config)  # of a vision model, too
    hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 1)
    head = getattr(config, "head_dim", None) or hidden // max(1, heads)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for experts in stacked_experts(model).values():
        idle = max(0, len(experts) - getattr(config, "num_experts_per_tok", len(experts)))
        num_parameters -= idle * experts.numel() // len(experts)
    return ModelSize(num_parameters, getattr(config, "num_hidden_layers", 0), heads * head, has_adapters)


def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of a device, by its name; None for an unknown one.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    words = set(device.replace("-", " ").split())
    return next((peak for name, peak in PEAKS.items() if name in words), None) if not words & SLOWER else None


def clock(device: torch.device) -> float:
    """Seconds now, by a clock of this process, once the device has done all that was launched on it. Without the wait
    a time would be that of launches."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class StepMeter:
    """Lifecycle: `begin` once the model is there, `note` after each step."""

    def __init__(
        self,
        meters: Meters,
        size: ModelSize | None = None,
        num_peers: int = 1,
        device: torch.device | None = None,
        num_epochs: int = 1,
    ) -> None:
        """`num_peers`: ranks that split the work on the same rows, this one among them. `num_epochs`: passes of an
        update over its rows."""
        self._meters, self._size, self._num_peers, self._num_epochs = meters, size, num_peers, num_epochs
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._peak = peak_flops(torch.cuda.get_device_name(self._gpu)) if self._gpu is not None else None

    def begin(self) -> None:
        for counter in (table.TRAINER_STEPS, table.TRAINER_SAMPLES, table.TRAINER_TOKENS):
            self._meters.add(counter, 0)
        self._meters.put(table.TRAINER_LAST_STEP, time.time())
        self._meters.put(table.TRAINER_MEMORY, self._peak_memory())

    def note(self, report: StepReport, rows: Rows) -> None:
        """Note a step. `rows`: that this rank has trained, also where another rank reports them."""
        meters = self._meters
        meters.add(table.TRAINER_STEPS)
        meters.add(table.TRAINER_SAMPLES, len(report.row_ids))
        meters.add(table.TRAINER_TOKENS, float(report.rows.response_tokens_N.sum()))
        self._note_phases(report.wait_s, report.train_s, report.seconds)
        meters.put(table.TRAINER_LAST_STEP, time.time())
        meters.put(table.TRAINER_MEMORY, self._peak_memory())
        self._note_flops(rows, report.seconds.get(WHOLE, 0.0), report.metrics.get(SHARED, 0.0))

    def _note_phases(self, wait_s: float, train_s: float, seconds: Mapping[str, float]) -> None:
        parts = {phase: seconds.get(phase, 0.0) for phase in PASSES}
        other_s = max(0.0, train_s - sum(parts.values()))
        for phase, value in {"wait": wait_s, **parts, "other": other_s}.items():
            self._meters.add(table.TRAINER_PHASES, value, phase=phase)

    def _note_flops(self, rows: Rows, seconds: float, shared: float) -> None:
        """Note the rate of an update. `shared`: share of tokens that were computed with others. A row of several
        segments counts as one sequence: an upper bound."""
        if self._size is None or not seconds:
            return
        lengths = (rows.lengths(context_column(rows)) + rows.lengths("response_ids")).tolist() if len(rows) else []
        flops = self._num_epochs * self._size.update_flops(lengths)
        rate = (1 - shared) * flops / self._num_peers / seconds
        self._meters.put(table.TRAINER_FLOPS, rate)
        if self._peak is not None:
            self._meters.put(table.TRAINER_MFU, rate / self._peak)

    def _peak_memory(self) -> float:
        if self._gpu is not None:
            return float(torch.cuda.max_memory_allocated(self._gpu))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
