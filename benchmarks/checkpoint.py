"""Costs of a checkpoint: training held up by a save that is waited for, and by one that is not; time to resume; and the
copy of the state that a rank keeps in shared memory.

    python -m benchmarks.checkpoint --json checkpoint.json

One rank with AdamW trains a random Qwen2 of the size; weights and moments are 12 bytes a parameter. *Held up* is what
the save and the next update take together, less the plain update right before the save: on a CPU, the writing takes
cores from it. *Blocked* is what the trainer waits for the save alone. A round has both kinds, and every other round has
them the other way round; medians over rounds, with the 95% interval of the median (bootstrap over rounds).
"""

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import (
    Target,
    interval,
    memory_folder,
    new_table,
    parse_arguments,
    print_targets,
    show,
    write_json,
)
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState

SIZES = {
    "3M": FreshModelConfig(num_layers=4, hidden_size=256, intermediate_size=704),
    "100M": FreshModelConfig(num_layers=12, hidden_size=768, intermediate_size=2816, num_heads=12, num_kv_heads=6),
    "500M": FreshModelConfig(num_layers=24, hidden_size=1280, intermediate_size=4608, num_heads=20, num_kv_heads=10),
}
TARGET_SIZE = "500M"
NUM_ROWS, NUM_TOKENS = 4, 64
ROUNDS = 7
RESUMED_ROUNDS = 3
"""Number of rounds in which the state is also read back, and kept in shared memory and restored."""
KINDS = ("synchronous", "asynchronous")
Round = dict[str, Any]


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
        self.memory, self.num_copies = MemoryCheckpoint(self.state, self.trainer, memory), 0
        self.has_room = True
        """True while there is room for two copies in shared memory."""
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
        """Time an update, a save, and the update after it, in seconds."""
        alone = self.update()
        target = self.folder / "saved"
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        self.state.begin(str(target))
        files = self.state.finish() if wait else []
        blocked, waited = time.perf_counter() - start, self.state.saver.waited_s
        update = self.update()
        blocked += self.state.saver.waited_s - waited
        with_update = time.perf_counter() - start
        files = files or self.state.finish()
        total = time.perf_counter() - start
        return {"alone_s": alone, "blocked_s": blocked, "update_s": update, "with_update_s": with_update,
                "total_s": total, "copy_s": self.state.saver.copied_s,
                "bytes": float(sum(file.num_bytes for file in files))}  # fmt: skip

    def keep(self) -> float:
        """Make a copy in shared memory. Returns seconds; not a number without room for two."""
        if not self.has_room:
            return math.nan
        self.num_copies += 1
        start = time.perf_counter()
        self.has_room = self.memory.save(self.num_copies) is None
        return time.perf_counter() - start if self.has_room else math.nan

    def restore(self) -> float:
        if not self.has_room:
            return math.nan
        start = time.perf_counter()
        self.memory.restore(self.num_copies)
        return time.perf_counter() - start

    def resume(self) -> float:
        start = time.perf_counter()
        self.state.load(str(self.folder / "saved"))
        return time.perf_counter() - start


def measure(size: str, folder: Path, memory: str, num_rounds: int) -> list[Round]:
    side = Side(size, folder, memory)
    rounds = []
    for number in range(num_rounds):
        entry: Round = {"size": size, "round": number, "num_parameters": side.num_parameters}
        for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
            entry[kind] = side.save(wait=kind == "synchronous")
        if number < RESUMED_ROUNDS:
            entry["resume_s"] = side.resume()
            entry["keep_s"], entry["restore_s"] = side.keep(), side.restore()
        rounds.append(entry)
    side.memory.close()
    side.trainer.close()
    return rounds


def median(key: str, kind: str = "") -> Callable[[Sequence[Round]], float]:
    """Make the statistic of rounds: of one kind of save, or of those that have it. Not a number where one is not."""

    def of(rounds: Sequence[Round]) -> float:
        values = [entry[kind][key] for entry in rounds] if kind else [one[key] for one in rounds if key in one]
        return math.nan if any(map(math.isnan, values)) else float(statistics.median(values))

    return of


def held(kind: str) -> Callable[[Sequence[Round]], float]:
    """Make the statistic of the seconds by which a save and the next update are longer than the update before."""
    return lambda rounds: float(
        statistics.median(entry[kind]["with_update_s"] - entry[kind]["alone_s"] for entry in rounds)
    )


def share(of: Callable[[str], Callable[[Sequence[Round]], float]]) -> Callable[[Sequence[Round]], float]:
    """Make the statistic of a save that is not waited for over that of one which is; at least 0."""
    return lambda rounds: max(0.0, of("asynchronous")(rounds)) / of("synchronous")(rounds)


def blocked(kind: str) -> Callable[[Sequence[Round]], float]:
    return median("blocked_s", kind)


def between(rounds: Sequence[Round], statistic: Callable[[Sequence[Round]], float], form: str = ".2f") -> str:
    """Format a statistic with its interval."""
    low, high = interval(rounds, statistic)
    return f"{statistic(rounds):{form}} ({low:{form}} to {high:{form}})"


def print_rounds(rounds: Sequence[Round], sizes: Sequence[str]) -> None:
    table = new_table(
        "A checkpoint: seconds by which training is held up (95% interval of the median)",
        [], ["parameters", "written GB", "update alone", "waited for", "not waited for", "share", "blocked",
        "copied in", "on disk after", "resumed in", "kept in", "restored in"],
    )  # fmt: skip
    seconds = (median("alone_s", "asynchronous"), held("synchronous"), held("asynchronous"))
    others = (median("copy_s", "asynchronous"), median("total_s", "asynchronous"), median("resume_s"))
    for size in sizes:
        mine = [entry for entry in rounds if entry["size"] == size]
        kept = [median(key)(mine) for key in ("keep_s", "restore_s")]
        table.add_row(
            size, f"{median('bytes', 'synchronous')(mine) / 1e9:.2f}",
            *(between(mine, statistic) for statistic in seconds),
            between(mine, share(held), ".1%"), between(mine, blocked("asynchronous"), ".3f"),
            *(f"{statistic(mine):.2f}" for statistic in others),
            *("no room" if math.isnan(value) else f"{value:.2f}" for value in kept),
        )  # fmt: skip
    show(table, 200)


def targets_of(rounds: Sequence[Round], size: str) -> list[Target]:
    mine = [entry for entry in rounds if entry["size"] == size]
    unit = "of a synchronous one"
    return [
        Target(f"blocked by an asynchronous save, {size}", share(blocked)(mine), unit, "<=", 0.10),
        Target(f"held up in all, cores shared with the writing, {size}", share(held)(mine), unit, "<=", 0.10),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    sizes = ["3M"] if arguments.quick else list(SIZES)
    torch.set_num_threads(2)
    rounds: list[Round] = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
            memory_folder() as memory,
        ):
            rounds += measure(size, Path(folder), str(memory), arguments.rounds or ROUNDS)
    print_rounds(rounds, sizes)
    targets = targets_of(rounds, sizes[-1])
    print_targets(targets)
    write_json(arguments.json, "checkpoint", rounds, targets)


if __name__ == "__main__":
    main()
