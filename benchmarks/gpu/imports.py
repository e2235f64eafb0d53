"""What Penstock calls of other packages, against the packages that are installed: that it is there, and takes arguments
of these names. No GPU is needed, so the CUDA builds can be looked at on any machine.

    make gpu-imports      # requirements/gpu.lock in an environment of its own, then this

    sources ─▶ names they import, and calls with their keywords ─▶ `inspect.signature` of what is installed

A call is looked at where its function is imported by name (`dist.new_group(...)`, `fully_shard(...)`), or is a method
of one of `RECEIVERS`. What is handed over as a dictionary is made as for a GPU, and given to the package
(`DICTIONARIES`).
"""

import ast
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FOLDERS = ("workers", "orchestrator/cluster", "benchmarks/gpu")
PACKAGES = (
    "torch",
    "vllm",
    "transformers",
    "deepspeed",
    "peft",
    "liger_kernel",
    "flash_attn",
    "accelerate",
    "safetensors",
)
SHOWN = {"torch", "vllm", "transformers", "deepspeed", "peft", "liger-kernel", "flash-attn", "nvidia-nccl-cu13"}
RECEIVERS = {
    ("rollout", "self.llm"): ("vllm.v1.engine.async_llm", "AsyncLLM"),
    ("engines", "self.deepspeed"): ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("engines", "self.root"): ("torch.distributed.fsdp", "FSDPModule"),
    ("engines", "unit"): ("torch.distributed.fsdp", "FSDPModule"),
}
"""Classes of objects whose methods are called, by the folder and the expression that they are called on."""
UNTOLD = "from_config"
"""Method of transformers' Auto classes, whose signature lacks its first argument."""


@dataclass(frozen=True)
class Use:
    """Something of a package that a source names, with the arguments of a call of it."""

    where: str
    module: str
    name: str
    """Attributes from the module on, with dots; empty: the module itself."""
    num_arguments: int = 0
    keywords: tuple[str, ...] = ()
    is_call: bool = False
    is_method: bool = False


def uses_of(path: Path) -> Iterator[Use]:
    """What a source imports of the packages, and how it calls that."""
    tree, known = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and _is_looked_at(node.module or ""):
            for alias in node.names:
                known[alias.asname or alias.name] = (str(node.module), alias.name)
                yield Use(where, str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_looked_at(alias.name):
                    known[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0],
                        "",
                    )
                    yield Use(where, alias.name, "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := _target(node.func, known, path.parent.name)) is not None:
            module, name, is_method = found
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
            is_counted = not any(isinstance(argument, ast.Starred) for argument in node.args)
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield Use(where, module, name, len(node.args) if is_counted else 0, keywords, True, is_method)


def _is_looked_at(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def _target(function: ast.expr, known: dict[str, tuple[str, str]], folder: str) -> tuple[str, str, bool] | None:
    """Module and name of what is called, and whether it is a method; None for what is of no package."""
    words = ast.unparse(function).split(".")
    receiver = folder, ".".join(words[:-1])
    if receiver in RECEIVERS:
        module, owner = RECEIVERS[receiver]
        return module, f"{owner}.{words[-1]}", True
    if words[0] in known and all(word.isidentifier() for word in words):
        module, name = known[words[0]]
        return module, ".".join(filter(None, [name, *words[1:]])), False
    return None


def problem_of(use: Use) -> str | None:
    """What is wrong with a use; None: nothing, as far as a signature tells."""
    found = importlib.import_module(use.module)
    for word in filter(None, use.name.split(".")):
        if not hasattr(found, word):
            try:
                found = importlib.import_module(f"{found.__name__}.{word}")
                continue
            except (ImportError, AttributeError):
                return f"{use.module} has no {use.name}"
        found = getattr(found, word)
    if not use.is_call or use.name.endswith(UNTOLD):
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # of C, without a signature
    arguments = [None] * (use.num_arguments + use.is_method)
    try:
        signature.bind_partial(*arguments, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.module}.{use.name}{signature} is called otherwise: {error}"
    return None


def vllm_arguments() -> None:
    """An engine's arguments on a GPU of its own, and on a shared one with an adapter."""
    from vllm import AsyncEngineArgs

    from penstock.conf.rollout import RolloutConfig
    from penstock.conf.trainer import LoraConfig
    from penstock.workers.protocols import EngineSpec
    from penstock.workers.rollout.engine_vllm import engine_arguments

    for share, adapter in ((1.0, None), (0.5, LoraConfig(rank=8))):
        spec = EngineSpec(RolloutConfig(num_gpus_per_worker=share), "model", transport="shm", adapter=adapter)
        inspect.signature(AsyncEngineArgs).bind(**engine_arguments(spec))


def transports() -> None:
    """The settings of every stream, which vLLM's own classes check."""
    from penstock.workers.weights.weight_senders import INIT_INFOS, SendingRank

    engines = types.SimpleNamespace(num_engines=2, workers_per_engine=1)
    device = torch.device("cuda", 0)
    rank = SendingRank(0, 1, device, list, lambda value: [value], torch.nn.Module(), "bfloat16")
    for make in INIT_INFOS.values():
        make(rank, engines, "127.0.0.1:29711", 2**20)


def deepspeed_settings() -> None:
    """DeepSpeed's settings for every stage on a GPU."""
    from deepspeed.runtime.config import DeepSpeedConfig as Parsed

    from penstock.conf.trainer import DeepSpeedConfig, TrainerConfig
    from penstock.workers.trainer.engines.deepspeed import settings

    for stage in (1, 2, 3):
        config = TrainerConfig(
            engine="deepspeed", offload=True, dtype="bfloat16", deepspeed=DeepSpeedConfig(zero_stage=stage)
        )
        Parsed(settings(config, "cuda", 1000))


def flash_attention() -> None:
    """What transformers hands to the package for `flash_attention_2`."""
    try:
        importlib.import_module("flash_attn_2_cuda")
    except ImportError:  # installed for its signatures alone, without kernels
        sys.modules["flash_attn_2_cuda"] = types.ModuleType("flash_attn_2_cuda")
    flash_attn = importlib.import_module("flash_attn")
    common = dict.fromkeys(("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic"))
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    inspect.signature(flash_attn.flash_attn_func).bind(None, None, None, **common)
    inspect.signature(flash_attn.flash_attn_varlen_func).bind(None, None, None, **common, **lengths)


DICTIONARIES: dict[str, tuple[str, Callable[[], None]]] = {
    "vLLM's engine arguments": ("vllm", vllm_arguments),
    "settings of ipc, nccl, nccl_m2n": ("vllm", transports),
    "DeepSpeed's settings": ("deepspeed", deepspeed_settings),
    "flash_attention_2 of transformers": ("flash_attn", flash_attention),
}
"""Dictionaries of arguments, with the package that they are for."""


def checked() -> Iterator[tuple[str, str | None]]:
    """Each thing that was looked at, and what is wrong with it."""
    absent = missing()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for use in uses_of(path):
                if use.module.split(".")[0] in absent:
                    continue
                try:
                    problem = problem_of(use)
                except Exception as error:  # noqa: BLE001 - a package may fail with anything when it is imported
                    problem = f"{use.module} cannot be imported: {type(error).__name__}: {error}"
                yield f"{use.where} {use.module}.{use.name}", problem
    for name, (package, look) in DICTIONARIES.items():
        if package in absent:
            continue
        try:
            look()
        except Exception as error:  # noqa: BLE001 - a package may fail with anything
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, None


def missing() -> list[str]:
    """Packages that are not installed, so that their uses are not looked at."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    found = list(checked())
    problems = [f"{what}: {problem}" for what, problem in found if problem is not None]
    print(*problems, sep="\n")
    print(f"Not installed, so not looked at: {', '.join(missing()) or 'none'}.")
    print(", ".join(f"{package} {installed(package)}" for package in sorted(SHOWN)))
    print(
        f"torch for CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "torch is the CPU build: these are not the GPU's."
    )
    print(f"{len(found)} names and calls looked at, {len(problems)} are not as Penstock has them.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
