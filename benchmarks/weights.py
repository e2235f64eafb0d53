"""Transfer of weights from the trainer's shards to a serving engine: publications in shared memory against the naive
way.

    python -m benchmarks.weights --json weights.json

Qwen2 with 3M, 100M and 500M random float32 parameters, FSDP2 on two ranks (gloo), one vLLM engine (CPU, bfloat16).
*Penstock*: every rank casts its shard into shared memory; the engine maps and loads it. *Naive*: bucket by bucket, the
ranks cast their shards and gather them on rank 0, `ray.put`, and the engine maps the bucket and loads it by vLLM's
layerwise reload, while the ranks gather the next. The sides alternate in one run on the same trainer and the same
engine, each once the cores rest; medians over rounds, in brackets the lowest and the highest. Memory is watched in each
side's first rounds, which are not timed: the watch takes a core from those that copy.

Rates are in published bytes (bfloat16; the trainer's side reads twice as many). `memcpy` copies as many bytes between
warm pages, in the same round. The engine's pause stands beside two things: one memcpy of the bytes, and what vLLM
itself takes to load them (its loaders, and the repacking of linear layers that its CPU build computes with).

The 500M size needs 14 GB of free memory.
"""

import shutil
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.harness import (
    Child,
    Target,
    memory_folder,
    new_table,
    parse_arguments,
    print_targets,
    settle,
    show,
    spread,
    write_json,
)
from benchmarks.weights_memory import Peak, folder_bytes, object_store_bytes, private_bytes
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import character_tokenizer
from penstock.workers.trainer.ranks import Meeting
from penstock.workers.weights.publication.publication_files import reclaim

DTYPE = "bfloat16"
"""Data type of the engine, and so of publications."""
NUM_RANKS = 2
BUCKET_BYTES = 2**27
"""Bytes of a bucket of the naive side: the embedding of the largest model alone has more, and is a bucket by itself."""
NUM_ROUNDS = 5
MEMCPY_BYTES = 2**29
"""The most that memcpy is measured with: far more than the caches, and less memory taken from the others."""
SIZES: dict[str, dict[str, int]] = {
    "3M": {"vocab_size": 8192, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
           "num_attention_heads": 6, "num_key_value_heads": 2},
    "100M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4},
    "500M": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
}  # fmt: skip
"""Models by size. The last is Qwen2.5-0.5B's shape: 494M."""
TARGET_SIZE = "500M"


def build_model(directory: Path, size: str) -> int:
    """Write a HF directory. Returns its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SIZES[size], tie_word_embeddings=True, max_position_embeddings=512, dtype="float32",
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    character_tokenizer(FreshModelConfig()).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass
class Cluster:
    """Processes for one model size: trainer ranks and engine, and where their memory is."""

    ranks: list[Child]
    engine: Child
    pids: list[int]
    raylet: int
    root: Path
    meeting: Meeting

    def ask_ranks(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask both at once. Returns the first one's answer, with the slower one's time."""
        with ThreadPoolExecutor(NUM_RANKS) as threads:
            answers = list(threads.map(lambda child: child.ask(request), self.ranks))
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers)}

    def close(self) -> None:
        for child in (*self.ranks, self.engine):
            child.close()
        self.meeting.close()


def start(model: Path, work: Path, root: Path, address: str) -> Cluster:
    meeting = Meeting("127.0.0.1")
    common = ["--model", str(model), "--dtype", DTYPE, "--ray", address]
    ranks = []
    for rank in range(NUM_RANKS):
        own = ["--address", meeting.address, "--rank", str(rank), "--num-ranks", str(NUM_RANKS)]
        own += ["--bucket-bytes", str(BUCKET_BYTES)]
        ranks.append(Child(f"rank {rank}", "weights_trainer", work / f"rank_{rank}.log", [*common, *own]))
    pids = [child.ready()["pid"] for child in ranks]
    engine = Child("engine", "weights_engine", work / "engine.log", common)
    parent = psutil.Process(engine.ready()["pid"])
    pids += [parent.pid, *(process.pid for process in parent.children(recursive=True))]
    raylet = next(process.pid for process in psutil.Process().children(recursive=True) if process.name() == "raylet")
    return Cluster(ranks, engine, pids, raylet, root, meeting)


def penstock_round(cluster: Cluster, version: int) -> dict[str, Any]:
    cluster.ask_ranks({"op": "tidy"})
    start = time.perf_counter()
    published = cluster.ask_ranks({"op": "publish", "root": str(cluster.root), "version": version})
    loaded = cluster.engine.ask({"op": "load", **published["info"]})
    total_s = time.perf_counter() - start
    reclaim(cluster.root, keep=2)
    return _seconds(published["seconds"], [loaded], total_s) | {"bytes": published["bytes"]} | _said(cluster)


def naive_round(cluster: Cluster) -> dict[str, Any]:
    """Run a naive round. A bucket is loaded while the next is gathered, so the whole is shorter than the two
    together."""
    num_buckets = cluster.ask_ranks({"op": "tidy"})["buckets"]
    start = time.perf_counter()
    loads: list[Future[dict[str, Any]]] = []
    publish_s, num_bytes = 0.0, 0
    with ThreadPoolExecutor(1) as thread:
        for number in range(num_buckets):
            gathered = cluster.ask_ranks({"op": "gather", "bucket": number})
            publish_s += gathered["seconds"]
            num_bytes += gathered["bytes"]
            if loads:
                loads[-1].result()  # no more than two buckets are there at a time
            place = {"first": number == 0, "last": number == num_buckets - 1}
            loads.append(thread.submit(cluster.engine.ask, {"op": "load_bucket", **gathered["info"], **place}))
        answers = [load.result() for load in loads]
    total_s = time.perf_counter() - start
    return _seconds(publish_s, answers, total_s) | {"bytes": num_bytes, "buckets": num_buckets} | _said(cluster)


def _seconds(publish_s: float, loads: list[dict[str, Any]], total_s: float) -> dict[str, Any]:
    """Seconds of one publication: its parts, and from its begin until the engine samples with it."""
    phases: Counter[str] = Counter()
    for load in loads:
        phases.update(load["phases"])
    return {
        "publish_s": publish_s,
        "load_s": sum(load["seconds"] for load in loads),
        "pause_s": loads[-1]["pause_s"],
        "total_s": total_s,
        "phases": dict(phases),
    }


def _said(cluster: Cluster) -> dict[str, Any]:
    return cluster.engine.ask({"op": "say"})


def memory_rounds(cluster: Cluster, empty_store: int) -> dict[str, dict[str, int]]:
    """Measure memory of each side: the most private memory above the start, and the most shared. Each side's first
    rounds, before a process has kept anything of the other's; with Penstock two, until both files are there."""
    with Peak(lambda: private_bytes(cluster.pids)) as private, Peak(lambda: folder_bytes(cluster.root)) as shared:
        for version in (1, 2):
            penstock_round(cluster, version)
    sides = {"Penstock": {"private_bytes": private.growth, "shared_bytes": shared.most}}
    with (
        Peak(lambda: private_bytes(cluster.pids)) as private,
        Peak(lambda: object_store_bytes(cluster.raylet)) as shared,
    ):
        naive_round(cluster)
    sides["naive"] = {"private_bytes": private.growth, "shared_bytes": shared.most - empty_store}
    return sides


def measure(size: str, work: Path, root: Path, num_rounds: int) -> list[dict[str, Any]]:
    parameters = build_model(work / "model", size)
    context = ray.init(
        "local", num_cpus=2, object_store_memory=max(2**27, 10 * parameters), include_dashboard=False,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    rounds = []
    try:
        cluster = start(work / "model", work, root, context.address_info["gcs_address"])
        empty_store = object_store_bytes(cluster.raylet)
        try:
            memory = memory_rounds(cluster, empty_store)
            for number in range(num_rounds):
                settle()
                sides = {"Penstock": penstock_round(cluster, number + 3)}
                settle()
                sides["naive"] = naive_round(cluster)
                if sides["Penstock"]["said"] != sides["naive"]["said"]:
                    raise SystemExit(f"With the same weights the engine has said two things: {sides}")
                size_bytes = sides["Penstock"]["bytes"]
                settle()
                copied = cluster.ranks[0].ask({"op": "memcpy", "bytes": min(size_bytes, MEMCPY_BYTES)})
                rates = {f"memcpy_{n}": min(size_bytes, MEMCPY_BYTES) / copied[f"seconds_{n}"] for n in (1, 2)}
                common = {"size": size, "round": number, "parameters": parameters, "bytes": size_bytes, **rates}
                rounds += [{**common, "side": side, **values, **memory[side]} for side, values in sides.items()]
        finally:
            cluster.close()
    finally:
        ray.shutdown()
        shutil.rmtree(work / "model")
    return rounds


@dataclass(frozen=True)
class Figures:
    """Rounds of one side at one size."""

    rounds: list[dict[str, Any]]

    @classmethod
    def of(cls, rounds: list[dict[str, Any]], size: str, side: str) -> "Figures":
        return cls([entry for entry in rounds if (entry["size"], entry["side"]) == (size, side)])

    def all(self, key: str) -> list[float]:
        return [entry[key] for entry in self.rounds]

    def median(self, key: str) -> float:
        return statistics.median(self.all(key))

    @property
    def vllm_s(self) -> list[float]:
        return [entry["phases"]["load"] for entry in self.rounds]

    def rates(self, key: str) -> list[float]:
        """Rates of publishing, over memcpy's (`memcpy_1`, `memcpy_2`) in the same round."""
        return [entry["bytes"] / entry["publish_s"] / entry[key] for entry in self.rounds]

    def memory(self, key: str) -> float:
        """Memory, `private_bytes` or `shared_bytes`, as a share of the float32 model."""
        return float(self.rounds[0][key]) / (4 * self.rounds[0]["parameters"])


def print_rounds(rounds: list[dict[str, Any]], sizes: list[str]) -> None:
    table = new_table(
        f"Weights: float32 FSDP2 on {NUM_RANKS} ranks to vLLM in {DTYPE}, medians over rounds (lowest-highest)",
        ["size", "side"], ["in all ms", "publish ms", "load ms", "pause ms", "vLLM ms", "of memcpy x1", "of memcpy x2",
        "private", "shared"],
    )  # fmt: skip
    for size in sizes:
        for side in ("Penstock", "naive"):
            one = Figures.of(rounds, size, side)
            seconds = *(one.all(key) for key in ("total_s", "publish_s", "load_s", "pause_s")), one.vllm_s
            times = [spread([1000 * value for value in values]) for values in seconds]
            shares = [spread(one.rates(key), 2) for key in ("memcpy_1", "memcpy_2")]
            memory = [f"{one.memory(key):.2f}x" for key in ("private_bytes", "shared_bytes")]
            table.add_row(size, side, *times, *shares, *memory)
    show(table, 190)


def targets_of(rounds: list[dict[str, Any]], size: str) -> list[Target]:
    ours, naive = Figures.of(rounds, size, "Penstock"), Figures.of(rounds, size, "naive")
    pairs = zip(ours.rounds, naive.rounds, strict=True)
    times = statistics.median(other["total_s"] / one["total_s"] for one, other in pairs)
    pause_s, copy_s = ours.median("pause_s"), ours.rounds[0]["bytes"] / ours.median("memcpy_1")
    memory = ours.memory("private_bytes") + ours.memory("shared_bytes")
    return [
        Target(f"{size}: publish and load, times faster than naive", times, "x", ">=", 3.0),
        Target(f"{size}: publish, of memcpy by two threads", statistics.median(ours.rates("memcpy_2")), "", ">=", 0.5),
        Target(f"{size}: engine paused, over one memcpy of the bytes", pause_s / copy_s, "x", "<=", 1.5),
        Target(
            f"{size}: engine paused, over vLLM's own loading", pause_s / statistics.median(ours.vllm_s), "x", "<=", 1.5
        ),
        Target(f"{size}: extra host memory, of the float32 model", memory, "x", "<=", 1.1),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    sizes = ["3M"] if arguments.quick else list(SIZES)
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for size in sizes:
            work = Path(tempfile.mkdtemp(dir=folder))
            with memory_folder() as root:
                rounds += measure(size, work, root, num_rounds)
    print_rounds(rounds, sizes)
    targets = targets_of(rounds, sizes[-1])
    print_targets(targets)
    write_json(arguments.json, "weights", rounds, targets)


if __name__ == "__main__":
    main()
