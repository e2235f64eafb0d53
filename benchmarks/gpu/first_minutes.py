"""The first fifteen minutes on one GPU: what the trainer does there, part by part, with a line of JSON for each.

    python -m benchmarks.gpu.first_minutes --json first_minutes.jsonl
    python -m benchmarks.gpu.first_minutes --only nccl update      # some parts

Each part is a process of its own with a time limit. A part that fails, hangs or crashes costs its own line and no
other. Neither vLLM nor Ray is needed, and nothing is downloaded. The parts that matter most come first: when the time
is up, the rest is left out by name. Without a GPU the same parts run on the CPU with tiny models, as a rehearsal.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import gpu_names, write_model
from benchmarks.harness import ROOT, memory_folder, new_table, show

Facts = dict[str, Any]
MINUTES = 15.0
CLOSE, COARSE = 2e-3, 5e-2
"""Bounds of differences: other kernels in float32; bfloat16 against float32."""
MODULES = ("vllm", "ray", "deepspeed", "flash_attn", "liger_kernel", "triton")
NO_TIME = "left out: no time was left"


@dataclass
class Bench:
    """What a part works with."""

    folder: Path

    @property
    def has_gpu(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.device_count() > 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.has_gpu else torch.device("cpu")

    @cached_property
    def model(self) -> Path:
        """Qwen2 of 0.5B parameters on a GPU, a tiny one without; random."""
        return self.written("0.5b" if self.has_gpu else "small")

    def written(self, size: str) -> Path:
        path = self.folder / size
        if not (path / "config.json").exists():
            write_model(path, size, self.device)
        return path

    def trainer(self, model: Path | None = None, *, attention: str = "sdpa", on_gpu: bool | None = None, **options: Any
                ) -> Any:  # fmt: skip
        from penstock.conf.trainer import OptimizerConfig, TrainerConfig
        from penstock.workers.trainer.policy_trainer import PolicyTrainer
        from penstock.workers.trainer.ranks import Ranks

        on_gpu = self.has_gpu if on_gpu is None else on_gpu
        config = TrainerConfig(num_gpus_per_rank=float(on_gpu), optimizer=OptimizerConfig(lr=1e-5), **options)
        ranks = replace(Ranks.join(config), device=self.device if on_gpu else torch.device("cpu"))
        return PolicyTrainer(config, str(model or self.model), ranks, attention=attention)

    def rows(self, num_rows: int = 32, longest: int = 512) -> Any:
        from benchmarks.gpu.training import random_rows

        return random_rows(*((num_rows, longest) if self.has_gpu else (8, 32)), seed=0)

    def seconds(self, call: Callable[[], Any], times: int = 3) -> float:
        """Seconds of the fastest of some calls, after one that is not counted."""
        return min([self.seconds_once(call) for _ in range(times + 1)][1:])

    def seconds_once(self, call: Callable[[], Any]) -> float:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def update(self, trainer: Any) -> Facts:
        """Two updates of a trainer: seconds and tokens of the second, peak bytes, the log-probabilities afterwards."""
        from penstock.algorithms.losses import ppo_clip_loss

        rows = self.rows()
        trainer.update(rows, ppo_clip_loss)
        if self.has_gpu:
            torch.cuda.reset_peak_memory_stats()
        report = trainer.update(rows, ppo_clip_loss)
        seconds = report.seconds["update"]
        tokens = int(rows.lengths("prompt_ids").sum() + rows.lengths("response_ids").sum())
        return {"seconds": seconds, "tokens_per_s": tokens / seconds, "grad_norm": report.metrics["actor/grad_norm"],
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.has_gpu else 0.0,
                "logprobs": np.concatenate(trainer.logprobs(rows))}  # fmt: skip


def packages(bench: Bench) -> Facts:
    """Versions, and what is installed."""
    free, total = torch.cuda.mem_get_info() if bench.has_gpu else (0, 0)
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpu_names() if bench.has_gpu else [],
        "free_gib": free / 2**30, "total_gib": total / 2**30,
        "installed": [name for name in MODULES if importlib.util.find_spec(name)],
    }  # fmt: skip


def nccl(bench: Bench) -> Facts:
    """One rank of NCCL: it starts, reduces, gathers, and ends."""
    import torch.distributed as dist

    backend = "nccl" if bench.has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{bench.folder / 'rendezvous'}", rank=0, world_size=1)
    values = torch.ones(64 * 2**20 if bench.has_gpu else 2**16, device=bench.device)
    gathered = torch.empty_like(values)
    facts = {
        "backend": backend,
        "all_reduce_s": bench.seconds(lambda: dist.all_reduce(values)),
        "all_gather_s": bench.seconds(lambda: dist.all_gather_into_tensor(gathered, values)),
    }
    assert torch.equal(gathered, values)
    dist.destroy_process_group()
    return facts


def update(bench: Bench) -> Facts:
    """Updates in bfloat16 and float32, and what the log-probabilities differ by from those of the CPU."""
    tiny = bench.written("small")
    found: Facts = {}
    for dtype, within in (("bfloat16", COARSE), ("float32", CLOSE)):
        ours, exact = (bench.update(bench.trainer(tiny, dtype=dtype if gpu else "float32", on_gpu=gpu))["logprobs"]
                       for gpu in (bench.has_gpu, False))  # fmt: skip
        found[f"difference_{dtype}"] = difference(ours, exact, within)
    real = bench.update(bench.trainer(dtype="bfloat16"))
    return found | {key: value for key, value in real.items() if key != "logprobs"}


def difference(one: Any, other: Any, within: float) -> float:
    found = float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())
    assert found <= within, f"differs by {found:.2e}, more than {within:.0e}"
    return found


def memory(bench: Bench) -> Facts:
    """The peak of an update of 1.5B parameters beside what `penstock validate` plans; see `memory_expandable`."""
    from benchmarks.gpu.training import Setting, told_bytes
    from penstock.conf.trainer import TrainerConfig

    path = bench.written("1.5b" if bench.has_gpu else "small")
    options = {"num_gpus_per_rank": float(bench.has_gpu), "dtype": "bfloat16", "activation_checkpointing": True}
    planned = told_bytes(Setting("sdpa", "recomputed"), TrainerConfig(**options), path, bench.rows())
    del options["num_gpus_per_rank"]
    facts = bench.update(bench.trainer(path, **options))
    reserved = torch.cuda.max_memory_reserved() / 2**30 if bench.has_gpu else 0.0
    return {"planned_gib": planned / 2**30, "peak_gib": facts["peak_gib"], "reserved_gib": reserved,
            "seconds": facts["seconds"]}  # fmt: skip


def transfers(bench: Bench) -> Facts:
    """GB/s to and from host memory of each kind, and of publishing, keeping, leaving and coming back."""
    from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
    from penstock.workers.trainer.training_state import TrainingState

    facts = host_rates(bench, 2**30 if bench.has_gpu else 2**22)
    trainer = bench.trainer(dtype="bfloat16")
    bench.update(trainer)
    held = sum(piece.values.numel() * piece.values.element_size() for piece in trainer.engine.state())
    steps = iter(range(1, 99))
    with memory_folder() as root:
        published = trainer.publication_bytes
        publish = bench.seconds(lambda: trainer.publish(f"{root}/published", next(steps)))
        copies = MemoryCheckpoint(TrainingState({"policy": trainer}), trainer, f"{root}/kept")
        keep = bench.seconds(lambda: copies.save(next(steps)))
        trainer.leave_device()
        trainer.take_device()  # the first time allocates host memory
        leave, take = [], []
        for _ in range(3):
            leave.append(bench.seconds_once(trainer.leave_device))
            take.append(bench.seconds_once(trainer.take_device))
    rates = {"publish": published / publish, "keep": held / keep, "leave": held / min(leave), "take": held / min(take)}
    return facts | {name: rate / 1e9 for name, rate in rates.items()} | {"state_gb": held / 1e9}


def host_rates(bench: Bench, size: int) -> Facts:
    """GB/s out of and into the device by pageable memory; on a GPU's machine also by pinned and registered memory."""
    on_device = torch.ones(size, dtype=torch.uint8, device=bench.device)
    kinds = [("pageable", torch.zeros(size, dtype=torch.uint8))]
    if bench.has_gpu:
        registered = torch.zeros(size, dtype=torch.uint8)
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(registered.data_ptr(), size, 0))
        kinds += [("pinned", torch.zeros(size, dtype=torch.uint8, pin_memory=True)), ("registered", registered)]
    facts: Facts = {}
    for kind, host in kinds:
        facts[f"{kind}_out"] = size / bench.seconds(partial(host.copy_, on_device)) / 1e9
        facts[f"{kind}_in"] = size / bench.seconds(partial(on_device.copy_, host)) / 1e9
    return facts


def trees(bench: Bench) -> Facts:
    """Rows of a group as a tree, forward and backward by FlexAttention, against each row alone."""
    facts = [bench.update(bench.trainer(dtype="bfloat16", share_prefixes=way)) for way in ("always", "never")]
    tree, alone = (one["tokens_per_s"] for one in facts)
    return {"difference": difference(facts[0]["logprobs"], facts[1]["logprobs"], COARSE), "gain": tree / alone}


def varlen(bench: Bench) -> Facts:
    """torch's own attention over packed rows (`torch.nn.attention.varlen`), forward and backward, against `sdpa`."""
    if not bench.has_gpu:
        return {"left_out": "torch has it for CUDA alone"}
    from torch.nn.attention.varlen import varlen_attn

    lengths = [300, 17, 512, 195]
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=bench.device)
    query, key, value = (
        torch.randn(sum(lengths), 8, 64, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    packed = varlen_attn(query, key, value, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
    packed.float().square().sum().backward()
    ours, query.grad = query.grad, None
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1))
    alone = torch.cat(parts)
    alone.float().square().sum().backward()
    found = [difference(one.detach().float().cpu(), other.detach().float().cpu(), COARSE * 4)
             for one, other in ((packed, alone), (ours, query.grad))]  # fmt: skip
    return {"difference": found[0], "difference_of_gradients": found[1]}


def kernels(bench: Bench) -> Facts:
    """`trainer.compile` and `trainer.liger` against plain layers: log-probabilities and tokens a second."""
    plain = bench.update(bench.trainer(dtype="bfloat16"))
    facts: Facts = {}
    ways = {
        "compile": {"compile": True},
        "packed": {"packing": "always"},
        "recomputed": {"activation_checkpointing": True},
    }
    if importlib.util.find_spec("liger_kernel") and bench.has_gpu:
        ways["liger"] = {"liger": True}
    for name, options in ways.items():
        try:
            found = bench.update(bench.trainer(dtype="bfloat16", **options))
            facts[name] = {"gain": found["tokens_per_s"] / plain["tokens_per_s"],
                           "difference": difference(found["logprobs"], plain["logprobs"], COARSE)}  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the other kernels are tried all the same
            facts[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    return facts


def ipc(bench: Bench) -> Facts:
    """A tensor of this process read and changed by a second one, by its handle."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(queue, answers))
    child.start()
    values = torch.ones(2**20, device=bench.device)
    queue.put(values)
    try:
        total = answers.get(timeout=60)
    finally:
        queue.put(None)
        child.join(30)
        child.kill()
    assert total == 2.0 * 2**20
    assert values.sum().item() == total, "the other process changed a copy"
    return {"bytes": values.numel() * 4}


def _double(queue: Any, answers: Any) -> None:
    values = queue.get(timeout=60)
    values *= 2
    answers.put(values.sum().item())
    queue.get(timeout=60)


def zero(bench: Bench) -> Facts:
    """Stages 1, 2 and 3 of ZeRO on one rank against FSDP2; each leaves the device and comes back with the same bits."""
    if not importlib.util.find_spec("deepspeed"):
        return {"left_out": "deepspeed is not installed"}
    from penstock.conf.trainer import DeepSpeedConfig

    tiny, rows = bench.written("small"), bench.rows()
    expected = bench.update(bench.trainer(tiny))["logprobs"]
    facts: Facts = {}
    for stage in (1, 2, 3):
        trainer = bench.trainer(tiny, engine="deepspeed", deepspeed=DeepSpeedConfig(zero_stage=stage))
        before = bench.update(trainer)["logprobs"]
        facts[f"difference_stage_{stage}"] = difference(before, expected, CLOSE)
        trainer.leave_device()
        trainer.take_device()
        difference(np.concatenate(trainer.logprobs(rows)), before, 0.0)
    return facts


def mixture(bench: Bench) -> Facts:
    """A small mixture of experts: an update of all weights, and one of LoRA on attention and experts."""
    from benchmarks.gpu.smoke.place import some_rows
    from penstock.algorithms.losses import ppo_clip_loss
    from penstock.conf.trainer import LoraConfig
    from tests.mixtures import build_mixture

    path = Path(build_mixture("qwen3_moe", bench.folder / "mixture"))
    facts: Facts = {}
    rows = some_rows()
    for name, options in (("whole", {}), ("lora", {"lora": LoraConfig(rank=4)})):
        trainer = bench.trainer(path, dtype="bfloat16", **options)
        trainer.update(rows, ppo_clip_loss)
        facts[name] = trainer.update(rows, ppo_clip_loss).metrics["actor/grad_norm"]
    return facts


def claims(bench: Bench) -> Facts:
    """All claims of tests/workers/trainer/on_a_device, on this device."""
    from penstock.workers.fresh_model import build_fresh_model
    from tests.workers.trainer.conftest import FRESH

    model, results = bench.folder / "claims model", bench.folder / "claims.json"
    build_fresh_model(model, FRESH, seed=3)
    (bench.folder / "claims").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.workers.trainer.on_a_device.claims", str(model),
               str(bench.folder / "claims"), str(results), *(["cuda"] if bench.has_gpu else [])]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=False, timeout=PARTS["claims"][1])
    failures = json.loads(results.read_text())
    assert not any(failures.values()), json.dumps({name: text[-300:] for name, text in failures.items() if text})
    return {"claims": len(failures)}


EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PARTS: dict[str, tuple[Callable[[Bench], Facts], float, dict[str, str]]] = {
    "packages": (packages, 60, {}),
    "nccl": (nccl, 90, {}),
    "update": (update, 180, {}),
    "memory": (memory, 150, {}),
    "memory_expandable": (memory, 150, EXPANDABLE),
    "transfers": (transfers, 120, {}),
    "trees": (trees, 180, {}),
    "varlen": (varlen, 60, {}),
    "kernels": (kernels, 240, {}),
    "ipc": (ipc, 90, {}),
    "zero": (zero, 180, {}),
    "mixture": (mixture, 90, {}),
    "claims": (claims, 300, {}),
}
"""Parts in the order of what they tell: function, time limit in seconds, variables of the process."""


def run_part(name: str, folder: Path, left_s: float) -> Facts:
    """Run a part in a process of its own; returns its line."""
    function, limit_s, variables = PARTS[name]
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu.first_minutes", "--part", name, "--folder", str(folder)]
    start, status = time.monotonic(), "failed"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables},
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(min(limit_s, left_s))
        except subprocess.TimeoutExpired:
            status = f"not done within {min(limit_s, left_s):.0f} s"
            os.killpg(process.pid, 9)
            process.wait()
    line: Facts = {"part": name, "what": (function.__doc__ or "").partition("\n")[0]}
    if result.exists():
        line |= json.loads(result.read_text())
    else:
        line |= {"status": status, "code": process.returncode, "log": log.read_text(errors="replace")[-3000:]}
    return line | {"took_s": round(time.monotonic() - start, 1)}


def take_part(name: str, folder: Path) -> None:
    """Run a part in this process; its facts, or what it raised, go to a file."""
    try:
        line = {"status": "ok", "facts": PARTS[name][0](Bench(folder))}
    except BaseException:  # noqa: BLE001 - whatever it is, it is a result
        line = {"status": "failed", "log": traceback.format_exc()[-3000:]}
    part = folder / f"{name}.part"
    part.write_text(json.dumps(line, default=float))
    part.rename(folder / f"{name}.json")
    os._exit(0)  # a library's threads may hang at the end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the lines of JSON to this file, too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all parts")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where models and logs go; default: a new one")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="penstock-first-minutes-"))
    if arguments.part is not None:
        take_part(arguments.part, folder)
    print(f"models, logs and lines.jsonl: {folder}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    table = new_table("First minutes", ["part", "status"], ["s"])
    lines = []
    for name in arguments.only:
        left_s = end - time.monotonic()
        line = run_part(name, folder, left_s) if left_s > 5 else {"part": name, "status": NO_TIME, "took_s": 0.0}
        lines.append(line)
        print(json.dumps(line), flush=True)
        for file in (folder / "lines.jsonl", arguments.json):
            if file is not None:
                with file.open("a") as output:
                    output.write(json.dumps(line) + "\n")
        table.add_row(name, line["status"], str(line["took_s"]))
    show(table)
    sys.exit(any(line["status"] == "failed" for line in lines))


if __name__ == "__main__":
    main()
