"""The measurements of its steps that a rank notes in `Meters`, after each."""

import resource
import time
from collections.abc import Mapping

import torch

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.data.rows import Rows
from penstock.workers.trainer.flops import ModelSize, peak_flops
from penstock.workers.trainer.report import StepReport
from penstock.workers.trainer.update.sequences import context_column

MISMATCH = "mismatch/logprob_abs_mean"
WHOLE = "update"
"""Key in `UpdateReport.seconds` for the whole update: all others together."""


class StepMeter:
    """Lifecycle: `begin` once the model is there, `note` after each step."""

    def __init__(
        self, meters: Meters, size: ModelSize | None = None, num_peers: int = 1, device: torch.device | None = None
    ) -> None:
        """`num_peers`: ranks that split the work on the same rows, this one among them."""
        self._meters, self._size, self._num_peers = meters, size, num_peers
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
        if MISMATCH in report.metrics:
            meters.put(table.TRAINER_MISMATCH, report.metrics[MISMATCH])
        self._note_flops(rows, report.seconds.get(WHOLE, 0.0))

    def _note_phases(self, wait_s: float, train_s: float, seconds: Mapping[str, float]) -> None:
        parts = {name: value for name, value in seconds.items() if name != WHOLE}
        prepare_s = max(0.0, train_s - seconds.get(WHOLE, 0.0) - seconds.get("keep", 0.0))
        for phase, value in {"wait": wait_s, "prepare": prepare_s, **parts}.items():
            self._meters.observe(table.TRAINER_PHASES, value, phase=phase)

    def _note_flops(self, rows: Rows, seconds: float) -> None:
        if self._size is None or not seconds:
            return
        lengths = (rows.lengths(context_column(rows)) + rows.lengths("response_ids")).tolist() if len(rows) else []
        rate = self._size.update_flops(lengths) / self._num_peers / seconds
        self._meters.put(table.TRAINER_FLOPS, rate)
        if self._peak is not None:
            self._meters.put(table.TRAINER_MFU, rate / self._peak)

    def _peak_memory(self) -> float:
        if self._gpu is not None:
            return float(torch.cuda.max_memory_allocated(self._gpu))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
