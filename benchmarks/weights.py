"""From the trainer's shards to a serving engine: publications in shared memory against what people write first.

    python -m benchmarks.weights --json weights.json

Qwen2 with 3M, 100M and 500M random float32 parameters, FSDP2 on two ranks (gloo), one vLLM engine (CPU, bfloat16).
*Penstock*: every rank casts its shard into shared memory; the engine maps and loads it. *Naive*: the full state dict is
gathered on rank 0, `ray.put`; the engine gets it and hands it to vLLM's `reload_weights`. The sides alternate in one
run on the same trainer and the same engine, each once the cores rest; medians over rounds. Memory is watched in each
side's first rounds, which are not timed: whoever samples it takes a core from those that copy.

Rates are in published bytes (bfloat16; the trainer's side reads twice as many). `memcpy` copies as many bytes between
warm pages, in the same round. The engine's pause stands beside two things: one memcpy of the bytes, and what vLLM
itself takes to load them (its loaders, and the repacking of linear layers that its CPU build computes with).

The 500M size needs 14 GB of free memory, most of it for the naive side.
"""

import shutil
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.harness import Child, Target, new_table, parse_arguments, print_targets, settle, show, write_json
from benchmarks.weights_memory import Peak, folder_bytes, object_store_bytes, private_bytes
from penstock.conf.model import FreshModelConfig
from penstock.store.data.roots import SHARED_MEMORY, claim_root, remove_root
from penstock.workers.models.fresh import character_tokenizer
from penstock.workers.trainer.meeting import Meeting
from penstock.workers.weights.publication.publication import reclaim

DTYPE = "bfloat16"
"""Of the engine, and so of publications."""
NUM_RANKS = 2
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
"""The last is Qwen2.5-0.5B's shape: 494M."""
TARGET_SIZE = "500M"


def build_model(directory: Path, size: str) -> int:
    """A HF directory; its number of parameters."""
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
    """Trainer ranks and engine of one model size, and where their memory is."""

    ranks: list[Child]
    engine: Child
    pids: list[int]
    raylet: int
    root: Path
    meeting: Meeting

    def ask_ranks(self, request: dict[str, Any]) -> dict[str, Any]:
        """Both at once; the first one's answer, with the slower one's time."""
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
        ranks.append(Child(f"rank {rank}", "weights_trainer", work / f"rank_{rank}.log", [*common, *own]))
    pids = [child.ready()["pid"] for child in ranks]
    engine = Child("engine", "weights_engine", work / "engine.log", common)
    parent = psutil.Process(engine.ready()["pid"])
    pids += [parent.pid, *(process.pid for process in parent.children(recursive=True))]
    raylet = next(process.pid for process in psutil.Process().children(recursive=True) if process.name() == "raylet")
    return Cluster(ranks, engine, pids, raylet, root, meeting)


def penstock_round(cluster: Cluster, version: int) -> dict[str, Any]:
    published = cluster.ask_ranks({"op": "publish", "root": str(cluster.root), "version": version})
    loaded = cluster.engine.ask({"op": "load", **published["info"]})
    reclaim(cluster.root, keep=2)
    return _seconds(published, loaded) | {"bytes": published["bytes"]}


def naive_round(cluster: Cluster, version: int) -> dict[str, Any]:
    gathered = cluster.ask_ranks({"op": "gather", "version": version})
    loaded = cluster.engine.ask({"op": "load_naively", **gathered["info"]})
    return _seconds(gathered, loaded)


def _seconds(sent: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    return {
        "publish_s": sent["seconds"],
        "load_s": taken["seconds"],
        "pause_s": taken["pause_s"],
        "phases": taken["phases"],
    }


def memory_rounds(cluster: Cluster, empty_store: int) -> dict[str, dict[str, int]]:
    """Of each side: the most private memory above the start, and the most shared. Each side's first rounds, before a
    process has kept anything of the other's; with Penstock two, until both files are there."""
    with Peak(lambda: private_bytes(cluster.pids)) as private, Peak(lambda: folder_bytes(cluster.root)) as shared:
        for version in (1, 2):
            penstock_round(cluster, version)
    sides = {"Penstock": {"private_bytes": private.growth, "shared_bytes": shared.most}}
    with (
        Peak(lambda: private_bytes(cluster.pids)) as private,
        Peak(lambda: object_store_bytes(cluster.raylet)) as shared,
    ):
        naive_round(cluster, 3)
    sides["naive"] = {"private_bytes": private.growth, "shared_bytes": shared.most - empty_store}
    return sides


def measure(size: str, work: Path, num_rounds: int) -> list[dict[str, Any]]:
    parameters = build_model(work / "model", size)
    context = ray.init(
        "local", num_cpus=2, object_store_memory=max(2**27, 10 * parameters), include_dashboard=False,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    root = claim_root(Path(SHARED_MEMORY) / f"penstock-bench-{work.name}")
    rounds = []
    try:
        cluster = start(work / "model", work, root, context.address_info["gcs_address"])
        empty_store = object_store_bytes(cluster.raylet)
        try:
            memory = memory_rounds(cluster, empty_store)
            for number in range(num_rounds):
                settle()
                sides = {"Penstock": penstock_round(cluster, 2 * number + 4)}
                settle()
                sides["naive"] = naive_round(cluster, 2 * number + 5)
                size_bytes = sides["Penstock"]["bytes"]
                settle()
                copied = cluster.ranks[0].ask({"op": "memcpy", "bytes": min(size_bytes, MEMCPY_BYTES)})
                rates = {f"memcpy_{n}": min(size_bytes, MEMCPY_BYTES) / copied[f"seconds_{n}"] for n in (1, 2)}
                common = {"size": size, "round": number, "parameters": parameters, "bytes": size_bytes, **rates}
                rounds += [{**common, "side": side, **values, **memory[side]} for side, values in sides.items()]
        finally:
            cluster.close()
    finally:
        remove_root(root)
        ray.shutdown()
        shutil.rmtree(work / "model")
    return rounds


@dataclass(frozen=True)
class Summary:
    """Medians of one side at one size. Seconds, bytes, bytes a second; memory as a share of the float32 model."""

    publish_s: float
    load_s: float
    pause_s: float
    vllm_load_s: float
    num_bytes: int
    memcpy_1: float
    memcpy_2: float
    private: float
    shared: float

    @property
    def total_s(self) -> float:
        return self.publish_s + self.load_s

    @classmethod
    def of(cls, rounds: list[dict[str, Any]], size: str, side: str) -> "Summary":
        chosen = [entry for entry in rounds if (entry["size"], entry["side"]) == (size, side)]
        model_bytes = 4 * chosen[0]["parameters"]

        def median(key: str) -> float:
            return statistics.median(entry[key] for entry in chosen)

        return cls(
            median("publish_s"), median("load_s"), median("pause_s"),
            statistics.median(entry["phases"]["load"] for entry in chosen), chosen[0]["bytes"],
            median("memcpy_1"), median("memcpy_2"),
            chosen[0]["private_bytes"] / model_bytes,
            chosen[0]["shared_bytes"] / model_bytes,
        )  # fmt: skip


def print_rounds(rounds: list[dict[str, Any]], sizes: list[str]) -> None:
    table = new_table(
        f"Weights: float32 FSDP2 on {NUM_RANKS} ranks to vLLM in {DTYPE}, medians over rounds",
        ["size", "side"], ["publish ms", "load ms", "pause ms", "vLLM ms", "publish GB/s", "of memcpy x1",
        "of memcpy x2", "private", "shared"],
    )  # fmt: skip
    for size in sizes:
        for side in ("Penstock", "naive"):
            one = Summary.of(rounds, size, side)
            rate = one.num_bytes / one.publish_s
            times = [f"{1000 * value:,.0f}" for value in (one.publish_s, one.load_s, one.pause_s, one.vllm_load_s)]
            shares = [f"{rate / one.memcpy_1:.2f}", f"{rate / one.memcpy_2:.2f}", f"{one.private:.2f}x"]
            table.add_row(size, side, *times, f"{rate / 1e9:.2f}", *shares, f"{one.shared:.2f}x")
    show(table, 130)


def targets_of(rounds: list[dict[str, Any]], size: str) -> list[Target]:
    ours, naive = Summary.of(rounds, size, "Penstock"), Summary.of(rounds, size, "naive")
    copy_s = ours.num_bytes / ours.memcpy_1
    rate = ours.num_bytes / ours.publish_s
    return [
        Target(f"{size}: publish and load, times faster than naive", naive.total_s / ours.total_s, "x", ">=", 3.0),
        Target(f"{size}: publish, of memcpy by as many threads as ranks", rate / ours.memcpy_2, "", ">=", 0.5),
        Target(f"{size}: engine paused, over one memcpy of the bytes", ours.pause_s / copy_s, "x", "<=", 1.5),
        Target(f"{size}: engine paused, over vLLM's own loading", ours.pause_s / ours.vllm_load_s, "x", "<=", 1.5),
        Target(f"{size}: extra host memory, of the float32 model", ours.private + ours.shared, "x", "<=", 1.1),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    sizes = ["3M"] if arguments.quick else list(SIZES)
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for size in sizes:
            work = Path(tempfile.mkdtemp(dir=folder))
            rounds += measure(size, work, num_rounds)
    print_rounds(rounds, sizes)
    targets = targets_of(rounds, sizes[-1])
    print_targets(targets)
    write_json(arguments.json, "weights", rounds, targets)


if __name__ == "__main__":
    main()
