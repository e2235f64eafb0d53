"""A side of the training benchmark: updates of one model on one rank, in a process whose memory is its own.

    in   {"kind": name, "seed": s, "loss": name, ...}: a kind of rows (`training_rows.py`), and what it is asked for
    out  {"seconds": s, "cpu_seconds": s, "samples": n, "tokens": n, "padding": share, "peak_bytes": n}

whole      Penstock's trainer, logits of the whole micro-batch kept for backward
tiled      the same, logits within its default budget
recomputed Penstock's trainer, each layer recomputed whole in backward
streamed   the same, each layer computed in chunks of tokens
bucketed   Penstock's trainer, micro-batches of rows of similar length within its default budget of tokens
packed     the same, micro-batches of any rows without padding
alone      Penstock's trainer, each row alone (`trainer.share_prefixes=never`)
shared     the same, rows of a group as trees where that pays (its default)
fixed      a straight-line loop, micro-batches of 8 rows as they come, padded to the longest of them

`tokens`: of all sequences; `samples`: rows. `padding`: share of what goes through the model. `peak_bytes`: the
process's resident memory at its highest during the update, above what it was before.
"""

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.channel import Channel
from benchmarks.peers.training_rows import KINDS, make_rows
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss
from penstock.algorithms.losses.preference import simpo_loss
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Loss
from penstock.workers.trainer.models.language_model import PolicyModel, load_causal_lm
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.update import batching

FIXED_ROWS = 8
PAGE_BYTES = 4096
SIDES = ("whole", "tiled", "recomputed", "streamed", "bucketed", "packed", "alone", "shared", "fixed")
COLUMNS = ("advantage", "behavior_logprobs")
ALL_MIB = 2.0**20
LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip_loss, "simpo": simpo_loss}
"""Losses of a row, and of two rows that stay together."""


class Fixed:
    """A straight-line loop: so many rows at a time, padded to the longest."""

    def __init__(self, model_path: str) -> None:
        self._model = PolicyModel(load_causal_lm(model_path))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)

    def update(self, rows: Rows, loss: Any) -> float:
        """Update by a loss of single rows; returns the share of padding."""
        totals = BatchTotals(int(rows.lengths("response_ids").sum()), len(rows))
        num_places = num_tokens = 0
        for cut in np.split(np.arange(len(rows)), range(FIXED_ROWS, len(rows), FIXED_ROWS)):
            batch = batching.collate(rows, cut, COLUMNS)
            num_places, num_tokens = num_places + batch.input_ids_SL.numel(), num_tokens + batch.num_tokens
            logprobs_N, _ = self._model(batch.input_ids_SL, batch.positions_N, batch.targets_N, "value")
            logprobs_BT = batch.scatter(logprobs_N)
            old_BT = logprobs_BT.detach()
            value, _ = loss(logprobs_BT, batch.mask_BT, totals, old_logprobs=old_BT, **batch.columns)
            value.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return 1 - num_tokens / num_places


class Penstock:
    def __init__(self, model_path: str, **options: Any) -> None:
        self._trainer = PolicyTrainer(TrainerConfig(**options), model_path)

    def update(self, rows: Rows, loss: Loss) -> float:
        return self._trainer.update(rows, loss).metrics["actor/padding_share"]


def memory_bytes(key: str) -> int:
    """Read VmRSS or VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(side: "Fixed | Penstock", rows: Rows, loss: Loss) -> dict[str, float]:
    num_tokens = int(batching.row_shapes(rows).num_tokens.sum())
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts as free
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = memory_bytes("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    padding = side.update(rows, loss)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "samples": len(rows),
        "tokens": num_tokens,
        "padding": padding,
        "peak_bytes": max(PAGE_BYTES, memory_bytes("VmHWM") - before),  # memory that was free may do for all of it
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("model")
    parser.add_argument("--vocabulary", type=int, required=True)
    arguments = parser.parse_args()
    channel = Channel()
    side: Fixed | Penstock
    if arguments.side == "fixed":
        side = Fixed(arguments.model)
    elif arguments.side in ("alone", "shared"):
        side = Penstock(arguments.model, share_prefixes="auto" if arguments.side == "shared" else "never")
    elif arguments.side in ("bucketed", "packed"):
        side = Penstock(arguments.model, packing="always" if arguments.side == "packed" else "never")
    elif arguments.side in ("recomputed", "streamed"):
        way = "stream" if arguments.side == "streamed" else True
        side = Penstock(arguments.model, activation_checkpointing=way)
    else:
        # All rows in one micro-batch.
        budget = {"logprob_chunk_mib": ALL_MIB} if arguments.side == "whole" else {}
        side = Penstock(arguments.model, max_tokens_per_microbatch=10**9, **budget)
    # The optimizer's state exists from here on.
    side.update(make_rows(0, arguments.vocabulary, count=2, response_tokens=8, spread=0.0, longest=8), ppo_clip_loss)
    channel.send({"ready": True})
    for request in channel.requests():
        loss, make, seed = LOSSES[request.pop("loss")], KINDS[request.pop("kind", "rows")], request.pop("seed")
        channel.send(measure(side, make(seed, arguments.vocabulary, **request), loss))


if __name__ == "__main__":
    main()
