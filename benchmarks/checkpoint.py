"""What a checkpoint costs: training held up by a save that is waited for, and by one that is not; time to resume. And
what a copy of the state costs that a rank keeps in shared memory.

    python -m benchmarks.checkpoint --json checkpoint.json

One rank with AdamW trains a random Qwen2 of the size; weights and moments are 12 bytes a parameter. *Held up* is what
the save and the next update take together, less a plain update: on a CPU, the writing takes cores from it. *Blocked* is
what the trainer waits for the save alone. Kinds alternate; medians over rounds.
"""

import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.roots import SHARED_MEMORY
from penstock.store.data.rows import Rows
from penstock.workers.models.fresh import build_fresh_model
from penstock.workers.trainer.kept.kept_state import KeptState
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState

SIZES = {
    "3M": FreshModelConfig(num_layers=4, hidden_size=256, intermediate_size=704),
    "100M": FreshModelConfig(num_layers=12, hidden_size=768, intermediate_size=2816, num_heads=12, num_kv_heads=6),
    "500M": FreshModelConfig(num_layers=24, hidden_size=1280, intermediate_size=4608, num_heads=20, num_kv_heads=10),
}
TARGET_SIZE = "500M"
NUM_ROWS, NUM_TOKENS = 4, 64
ROUNDS = 3


def rows() -> Rows:
    random = np.random.default_rng(0)
    ids = [random.integers(3, 90, NUM_TOKENS).tolist() for _ in range(NUM_ROWS)]
    logprobs = [[-4.5] * NUM_TOKENS for _ in ids]
    columns = {"prompt_ids": [[5]] * NUM_ROWS, "response_ids": ids, "behavior_logprobs": logprobs}
    return Rows.from_lists({**columns, "advantage": random.normal(size=NUM_ROWS).tolist()}, group_ids=[0] * NUM_ROWS)


class Side:
    """A trainer that has warmed up, its checkpoints, and its copies in shared memory."""

    def __init__(self, size: str, folder: Path, memory: str) -> None:
        build_fresh_model(folder / "model", SIZES[size], seed=0)
        self.size, self.folder, self.batch = size, folder, rows()
        self.trainer = PolicyTrainer(TrainerConfig(), str(folder / "model"))
        self.state = TrainingState({"policy": self.trainer})
        self.kept, self.num_kept = KeptState(self.state, self.trainer, memory), 0
        self.has_room = True
        """For two copies in shared memory."""
        self.num_parameters = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        self.update()
        for _ in range(2):  # the copies' pages are fresh the first time
            self.save(wait=True)
            self.keep()

    def update(self) -> float:
        start = time.perf_counter()
        self.trainer.update(self.batch, ppo_clip_loss)
        return time.perf_counter() - start

    def save(self, *, wait: bool) -> dict[str, float]:
        """A save and the update after it; seconds."""
        target = self.folder / "saved"
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        self.state.begin(str(target))
        files = self.state.finish() if wait else []
        blocked, waited = time.perf_counter() - start, self.state.waited_s
        update = self.update()
        blocked += self.state.waited_s - waited
        with_update = time.perf_counter() - start
        files = files or self.state.finish()
        total = time.perf_counter() - start
        return {"blocked_s": blocked, "update_s": update, "with_update_s": with_update, "total_s": total,
                "bytes": float(sum(file.num_bytes for file in files))}  # fmt: skip

    def keep(self) -> float:
        """A copy in shared memory; not a number without room for two."""
        if not self.has_room:
            return math.nan
        self.num_kept += 1
        start = time.perf_counter()
        self.has_room = self.kept.keep(self.num_kept) is None
        return time.perf_counter() - start if self.has_room else math.nan

    def restore(self) -> float:
        if not self.has_room:
            return math.nan
        start = time.perf_counter()
        self.kept.restore(self.num_kept)
        return time.perf_counter() - start

    def resume(self) -> float:
        start = time.perf_counter()
        self.state.load(str(self.folder / "saved"))
        return time.perf_counter() - start


def measure(size: str, folder: Path, memory: str, num_rounds: int) -> list[dict[str, Any]]:
    side = Side(size, folder, memory)
    rounds = []
    for number in range(num_rounds):
        entry: dict[str, Any] = {"size": size, "round": number, "num_parameters": side.num_parameters}
        entry["update_s"] = side.update()
        entry["synchronous"] = side.save(wait=True)
        entry["asynchronous"] = side.save(wait=False)
        entry["copy_s"] = side.state.copied_s
        entry["resume_s"] = side.resume()
        entry["keep_s"], entry["restore_s"] = side.keep(), side.restore()
        rounds.append(entry)
    side.kept.close()
    side.trainer.close()
    return rounds


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of one size."""

    def median(value: Any) -> float:
        return float(statistics.median(value(entry) for entry in rounds))

    update = median(lambda entry: entry["update_s"])
    blocked = {kind: median(lambda entry, kind=kind: entry[kind]["blocked_s"])
               for kind in ("synchronous", "asynchronous")}  # fmt: skip
    held = {kind: median(lambda entry, kind=kind: entry[kind]["with_update_s"]) - update
            for kind in ("synchronous", "asynchronous")}  # fmt: skip
    return {
        "update_s": update, **held, "share": max(0.0, held["asynchronous"]) / held["synchronous"],
        "stall": blocked["asynchronous"], "stall_share": blocked["asynchronous"] / blocked["synchronous"],
        "copy_s": median(lambda entry: entry["copy_s"]), "resume_s": median(lambda entry: entry["resume_s"]),
        "keep_s": median(lambda entry: entry["keep_s"]), "restore_s": median(lambda entry: entry["restore_s"]),
        "written_s": median(lambda entry: entry["asynchronous"]["total_s"]),
        "gigabytes": median(lambda entry: entry["synchronous"]["bytes"]) / 1e9,
    }  # fmt: skip


def print_rounds(by_size: dict[str, dict[str, float]]) -> None:
    table = new_table(
        "A checkpoint: seconds by which training is held up",
        [], ["parameters", "written", "update alone", "waited for", "not waited for", "share", "blocked",
        "copied in", "on disk after", "resumed in", "kept in", "restored in"],
    )  # fmt: skip
    for size, found in by_size.items():
        table.add_row(
            size, f"{found['gigabytes']:.2f} GB", f"{found['update_s']:.2f} s", f"{found['synchronous']:.2f} s",
            f"{found['asynchronous']:.2f} s", f"{found['share']:.1%}", f"{found['stall']:.3f} s",
            f"{found['copy_s']:.2f} s", f"{found['written_s']:.2f} s", f"{found['resume_s']:.2f} s",
            *("no room" if math.isnan(found[key]) else f"{found[key]:.2f} s" for key in ("keep_s", "restore_s")),
        )  # fmt: skip
    show(table, 150)


def main() -> None:
    arguments = parse_arguments(__doc__)
    sizes = ["3M"] if arguments.quick else list(SIZES)
    torch.set_num_threads(2)
    rounds: list[dict[str, Any]] = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
            tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=SHARED_MEMORY) as memory,
        ):
            rounds += measure(size, Path(folder), memory, arguments.rounds or ROUNDS)
    by_size = {size: summary([entry for entry in rounds if entry["size"] == size]) for size in sizes}
    print_rounds(by_size)
    last = by_size[sizes[-1]]
    unit = "of a synchronous one"
    targets = [
        Target(f"blocked by an asynchronous save, {sizes[-1]}", last["stall_share"], unit, "<=", 0.10),
        Target(f"held up in all, cores shared with the writing, {sizes[-1]}", last["share"], unit, "<=", 0.10),
    ]
    print_targets(targets)
    write_json(arguments.json, "checkpoint", rounds, targets)


if __name__ == "__main__":
    main()
