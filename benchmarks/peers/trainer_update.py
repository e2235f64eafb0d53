"""A side of the training benchmark: updates of one model on one rank, in a process whose memory is its own.

    in   {"rows": N, "seed": s}
    out  {"seconds": s, "cpu_seconds": s, "tokens": n, "padding": share, "peak_bytes": n}

whole      Penstock's trainer, logits of the whole micro-batch kept for backward
tiled      the same, logits within its default budget
bucketed   Penstock's trainer, micro-batches of rows of similar length within its default budget of tokens
fixed      a straight-line loop, micro-batches of 8 rows as they come, padded to the longest of them

`tokens`: of prompts and responses. `padding`: share of what goes through the model. `peak_bytes`: the process's
resident memory at its highest during the update, above what it was before.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.channel import Channel
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.models.language_model import PolicyModel, load_causal_lm
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.update import batching

PROMPT_TOKENS = 16
FIXED_ROWS = 8
PAGE_BYTES = 4096
COLUMNS = ("advantage", "behavior_logprobs")
ALL_MIB = 2.0**20


class Fixed:
    """A straight-line loop: so many rows at a time, padded to the longest."""

    def __init__(self, model_path: str) -> None:
        self._model = PolicyModel(load_causal_lm(model_path))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)

    def cuts(self, lengths: np.ndarray) -> list[np.ndarray]:
        return np.split(np.arange(len(lengths)), range(FIXED_ROWS, len(lengths), FIXED_ROWS))

    def update(self, rows: Rows) -> None:
        totals = BatchTotals(int(rows.lengths("response_ids").sum()), len(rows))
        for cut in self.cuts(batching.row_lengths(rows)[0]):
            batch = batching.collate(rows, cut, COLUMNS)
            logprobs_N, _ = self._model(batch.input_ids_SL, batch.positions_N, batch.targets_N, "value")
            logprobs_BT = batch.scatter(logprobs_N)
            old_BT = logprobs_BT.detach()
            loss, _ = ppo_clip_loss(logprobs_BT, batch.mask_BT, totals, old_logprobs=old_BT, **batch.columns)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Penstock:
    def __init__(self, model_path: str, **options: Any) -> None:
        self._trainer = PolicyTrainer(TrainerConfig(**options), model_path)

    def cuts(self, lengths: np.ndarray) -> list[np.ndarray]:
        return batching.plan(lengths, self._trainer.config.microbatch_tokens)

    def update(self, rows: Rows) -> None:
        self._trainer.update(rows, ppo_clip_loss)


def make_rows(count: int, seed: int, response_tokens: int, spread: float, longest: int, vocabulary: int) -> Rows:
    """Make responses of a median of `response_tokens` tokens, lognormal with that spread (0: all alike)."""
    random = np.random.default_rng(seed)
    lengths = np.clip(response_tokens * random.lognormal(0, spread, count), 1, longest).astype(int)
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, vocabulary, PROMPT_TOKENS).tolist() for _ in lengths],
            "response_ids": [random.integers(3, vocabulary, length).tolist() for length in lengths],
            "behavior_logprobs": [(-np.log(vocabulary) + np.zeros(length)).tolist() for length in lengths],
            "advantage": random.normal(size=count).tolist(),
        }
    )


def memory_bytes(key: str) -> int:
    """Read VmRSS or VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(side: "Fixed | Penstock", rows: Rows) -> dict[str, float]:
    lengths, _ = batching.row_lengths(rows)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = memory_bytes("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    side.update(rows)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    padded = sum(len(cut) * int(lengths[cut].max()) for cut in side.cuts(lengths))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": int(lengths.sum()),
        "padding": 1 - int(lengths.sum()) / padded,
        "peak_bytes": max(PAGE_BYTES, memory_bytes("VmHWM") - before),  # memory that was free may do for all of it
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("whole", "tiled", "bucketed", "fixed"))
    parser.add_argument("model")
    for name in ("response_tokens", "longest", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--spread", type=float, default=0.0)
    options = vars(parser.parse_args())
    name, model = options.pop("side"), options.pop("model")
    channel = Channel()
    side: Fixed | Penstock
    if name == "fixed":
        side = Fixed(model)
    elif name == "bucketed":
        side = Penstock(model)
    else:
        # All rows in one micro-batch.
        budget = {"logprob_chunk_mib": ALL_MIB} if name == "whole" else {}
        side = Penstock(model, max_tokens_per_microbatch=10**9, **budget)
    side.update(make_rows(2, 0, **{**options, "response_tokens": 8}))  # the optimizer's state exists from here on
    channel.send({"ready": True})
    for request in channel.requests():
        rows = make_rows(request["rows"], request["seed"], **options)
        channel.send(measure(side, rows))


if __name__ == "__main__":
    main()
