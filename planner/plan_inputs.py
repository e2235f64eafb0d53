"""The inputs of `penstock plan`, as a search: the run, the cluster, the lengths of responses.

Models that people plan with before they have them are known by the hub's names, with the sizes of their config.json.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import ConfigError, ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.assignment import chosen_nodes
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.cluster.ray_cluster import look
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, gpu_bytes, shapes_of
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.prerequisites import starting_model_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.run_memory import GIB
from penstock.planner.hardware import KINDS, GpuKind, Nodes, parse_cluster
from penstock.planner.lengths import SIGMA, Lengths, Turns
from penstock.planner.search import Search

QWEN2_VOCABULARY, QWEN3_VOCABULARY, LLAMA_VOCABULARY = 151936, 151936, 128256
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8}
TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
"""What sees in Qwen2.5-VL, of whichever size."""
# kind, layers, hidden, heads, heads of keys and values, width of a head, width of an MLP or an expert, vocabulary, tied
_SIZES: Mapping[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 36, 2048, 16, 2, 128, 11008, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "Qwen/Qwen2.5-VL-3B": ("qwen2_5_vl", 36, 2048, 16, 2, 128, 11008, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-VL-7B": ("qwen2_5_vl", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 128, 3072, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 28, 2048, 16, 8, 128, 6144, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-4B": ("qwen3", 36, 2560, 32, 8, 128, 9728, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 128, 12288, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-14B": ("qwen3", 40, 5120, 40, 8, 128, 17408, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 128, 25600, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 768, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 1536, QWEN3_VOCABULARY, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, QWEN2_VOCABULARY, False),
    "meta-llama/Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 128, 14336, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 128, 28672, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.1-405B": ("llama", 126, 16384, 128, 8, 128, 53248, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 8192, LLAMA_VOCABULARY, True),
    "meta-llama/Llama-3.2-3B": ("llama", 28, 3072, 24, 8, 128, 8192, LLAMA_VOCABULARY, True),
    "mistralai/Mistral-7B": ("mistral", 32, 4096, 32, 8, 128, 14336, 32768, False),
    "mistralai/Mistral-Nemo": ("mistral", 40, 5120, 32, 8, 128, 14336, 131072, False),
    "mistralai/Mistral-Small-24B": ("mistral", 40, 5120, 32, 8, 128, 32768, 131072, False),
    "google/gemma-2-2b": ("llama", 26, 2304, 8, 4, 256, 9216, 256000, True),
    "google/gemma-2-9b": ("llama", 42, 3584, 16, 8, 256, 14336, 256000, True),
    "google/gemma-2-27b": ("llama", 46, 4608, 32, 16, 128, 36864, 256000, True),
    "google/gemma-3-1b": ("llama", 26, 1152, 4, 1, 256, 6912, 262144, True),
    "google/gemma-3-4b": ("llama", 34, 2560, 8, 4, 256, 10240, 262208, True),
    "google/gemma-3-12b": ("llama", 48, 3840, 16, 8, 256, 15360, 262208, True),
    "google/gemma-3-27b": ("llama", 62, 5376, 32, 16, 128, 21504, 262208, True),
}
"""Gemma's layers have two more norms than Llama's, a ten-thousandth of their parameters. Of models that see, except
Qwen2.5-VL, it is the text."""
_BY_NAME = {name.rpartition("/")[2].lower(): sizes for name, sizes in _SIZES.items()}
NO_SIZE = re.compile(r"-(instruct|base|thinking|chat|it|pt|v0\.\d|2[45]\d\d)(?=-|$)")
"""Parts of names that change no size."""
LIKE = (
    (r"^qwen2\.5-(math|coder)-", "qwen2.5-"), (r"^qwen2-(?!vl)", "qwen2.5-"), (r"^qwen3-coder-", "qwen3-"),
    (r"^(meta-)?llama-3(\.[13])?-", "llama-3.1-"), (r"^deepseek-r1-distill-llama-", "llama-3.1-"),
    (r"^deepseek-r1-distill-qwen-(?!1\.5b)", "qwen2.5-"),
)  # fmt: skip
"""Beginnings of names of models, each with that of the models whose sizes they have."""


def known_shape(name: str) -> ModelShape | None:
    """Sizes of a model of the hub, by the last part of its name; None for one that is not known here."""
    name = NO_SIZE.sub("", name.rpartition("/")[2].lower())
    for pattern, other in LIKE:
        name = re.sub(pattern, other, name)
    sizes = _BY_NAME.get(name)
    if sizes is None:
        return None
    kind, layers, hidden, heads, kv_heads, head_dim, width, vocabulary, is_tied = sizes
    values = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": width,
        "moe_intermediate_size": width, "vocab_size": vocabulary, "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768 if kind.startswith("qwen") else 131072,
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        values["vision_config"] = TOWER | {"out_hidden_size": hidden}
    return ModelShape.of(values | (MIXTURE if kind == "qwen3_moe" else {}))


USUAL_SHARE = 0.4
"""Default mean length, as a share of rollout.sampling.max_tokens."""
USUAL_PROMPT = 150
"""Default tokens of a prompt."""
USUAL_ADDED = 100
"""Default tokens that an environment adds before a further turn."""
UNCOUNTED = (
    "trainer.engine", "trainer.compile", "trainer.liger", "trainer.activation_offload", "trainer.replay.share",
    "trainer.packing", "trainer.share_prefixes", "rollout.router_replay", "rollout.max_pictures",
    "rollout.speculation.method", "weights.transport",
)  # fmt: skip
"""Keys that change the seconds of a run, which the cost model leaves out."""
COUNTED = ("kv_cache_dtype", "quantization")
"""Options of an engine that the cost model knows, but for the quantization `online`, which is any."""


def search_of(
    config: RunConfig,
    cluster: str | None,
    lengths: str | None,
    nodes: Sequence[Node] = (),
    flow: Dataflow | None = None,
    turns: str | None = None,
) -> Search:
    """The search. `cluster`: as `2x8:h100`; None: `nodes`, of the cluster that Ray knows. `lengths`: `MEAN` or
    `MEAN:SIGMA` tokens of a response. `flow`: a dataflow of the user's own. `turns`: of an attempt, as `turns_of` reads
    them. Raises `ConfigError`, `ResourceError`."""
    if flow is None:
        run = resolve(config)
        named = replace(config, trainer=replace(config.trainer, policies=run.config.trainer.policies))
        return search_of(named, cluster, lengths, nodes, run.flow, turns)
    if config.evaluation.num_workers:
        raise ConfigError(
            f"evaluation.num_workers={config.evaluation.num_workers}: a plan has no engines of evaluations' own. Leave "
            "it out, or choose placement and numbers of engines and ranks yourself (plan=never)."
        )
    if cluster is not None:
        found = parse_cluster(cluster)
    else:
        memory = gpu_bytes(config, nodes)
        found = nodes_by_kind(nodes, memory and memory / GIB, config.cluster.gpu_memory_gib)
    own = replace(lengths_of(config, lengths), turns=turns_of(config, turns))
    return Search(config, flow, model_shapes(config, flow), found, own)


def model_shapes(config: RunConfig, flow: Dataflow) -> dict[str, ModelShape]:
    """Sizes of the run's models. Raises `ConfigError` where the policy's are not known."""
    found, model = shapes_of(config, flow), starting_model_config(config)
    if "policy" not in found and model.path is not None and (shape := known_shape(model.path)) is not None:
        found["policy"] = shape
    for name in config.trainer.own_models:
        if name not in found and (shape := known_shape(config.model.paths.get(name, ""))) is not None:
            found[name] = shape
    if "policy" not in found:
        raise ConfigError(
            f"model.path={model.path}: its sizes are not on this machine, and it is none that is known by name. Give "
            "model.path a directory with its config.json; weights are not needed for a plan."
        )
    return found


def lengths_of(config: RunConfig, text: str | None) -> Lengths:
    """The lengths of responses that are asked for, or usual ones. Raises `ConfigError`."""
    cap = config.longest_response
    prompt = min(USUAL_PROMPT, max(1, config.rollout.max_model_len - cap))
    if text is None:
        return Lengths.lognormal(max(1.0, USUAL_SHARE * cap), cap, prompt=prompt)
    mean, _, sigma = text.partition(":")
    try:
        return Lengths.lognormal(float(mean), cap, float(sigma) if sigma else SIGMA, prompt)
    except ValueError:
        raise ConfigError(
            f"--lengths {text!r}: write the mean number of tokens of a response, as in 900, or with the spread of its "
            "logarithm, as in 900:0.8."
        ) from None


def turns_of(config: RunConfig, text: str | None) -> Turns:
    """The turns of an attempt that are asked for, as `N`, `N:SECONDS` or `N:SECONDS:TOKENS` with what an environment
    takes and adds before each further one; else usual ones, and one without an environment. Raises `ConfigError`."""
    if text is None and config.environment.name is None:
        return Turns()
    rollout, usual = config.rollout, max(1.0, USUAL_SHARE * config.environment.max_turns)
    try:
        given = [float(part) for part in text.split(":")] if text is not None else [usual]
    except ValueError:
        given = []
    if not 1 <= len(given) <= 3 or given[0] < 1 or min(given) < 0:
        raise ConfigError(
            f"--turns {text!r}: write the turns of an attempt, as in 6, or with the seconds that the environment takes "
            "before each further one and the tokens that it adds, as in 6:2.5:300."
        )
    added = min(USUAL_ADDED, rollout.max_model_len / 2 / given[0])
    defaults = [usual, 0.0, added][len(given) :]
    count, wait_s, added = [*given, *defaults]
    return Turns(count, added, wait_s, float(rollout.engine_options.get("enable_prefix_caching") is False))


def uncounted_keys(config: RunConfig) -> list[str]:
    """Keys that the run sets and whose seconds no plan counts, as on the command line."""
    usual = RunConfig()
    keys = [(key, of(config)) for key in UNCOUNTED if (of := attrgetter(key))(config) != of(usual)]
    options = config.rollout.engine_options
    options = {key: value for key, value in options.items() if key not in COUNTED or value == "online"}
    keys += [(f"rollout.engine_options.{key}", value) for key, value in options.items()]
    return [f"{key}={_override_value(value)}" for key, value in keys]


def parse_hours(text: str) -> float:
    """The hours of `hours=H`. Raises `ConfigError`."""
    key, _, value = text.partition("=")
    if key != "hours" or not value.replace(".", "", 1).isdigit():
        raise ConfigError(f"--within {text!r}: write the hours that the run may take, as in hours=12.")
    return float(value)


def nodes_by_kind(
    nodes: Sequence[Node], gpu_gib: float | None = None, given_gib: float | None = None
) -> tuple[Nodes, ...]:
    """The nodes with GPUs of a Ray cluster, by Ray's label of their kind. `gpu_gib`: memory of GPUs whose label does
    not say it: of `A100` there are two sizes, and those of an unknown kind are taken to be as fast as the kind with the
    nearest memory. `given_gib`: cluster.gpu_memory_gib, which all have. Raises `ResourceError`."""
    by_label = {kind.ray_name or kind.name: kind for kind in KINDS.values()} | {"A100-80G": KINDS["a100"]}
    if gpu_gib is not None:
        by_label["A100"] = min(KINDS["a100"], KINDS["a100-40gb"], key=lambda kind: abs(kind.memory_gib - gpu_gib))
    if given_gib is not None:
        by_label = {label: replace(kind, memory_gib=given_gib) for label, kind in by_label.items()}
    hosts: dict[tuple[str, int], list[float]] = {}
    for node in nodes:
        if node.gpus:
            hosts.setdefault((node.labels.get(ACCELERATOR, ""), int(node.gpus)), []).append(node.memory or math.inf)
    if not hosts:
        raise ResourceError(
            "A plan is about GPUs, and none is known: no cluster answers at RAY_ADDRESS, or its nodes have none. "
            "Describe one: --cluster 2x8:h100. For the cores of this machine give a run of ten steps here: --from RUN."
        )
    for label, _ in hosts:
        if label not in by_label and gpu_gib is not None:
            like = min(KINDS.values(), key=lambda kind: (abs(kind.memory_gib - gpu_gib), kind.flops))
            name = f"{label or 'GPU'} of {gpu_gib:.0f} GiB as fast as {like.name}"
            by_label[label] = replace(like, name=name, memory_gib=gpu_gib, ray_name=label)
        elif label not in by_label:
            raise ResourceError(
                f"A node has GPUs that are not known here ({ACCELERATOR}={label or 'not set'}). Describe the cluster: "
                f"--cluster NxG:KIND, where KIND is {', '.join(sorted(KINDS))} or a YAML file."
            )
    return tuple(Nodes(len(each), gpus, by_label[label], min(each)) for (label, gpus), each in hosts.items())


def nodes_here(config: ClusterConfig) -> Sequence[Node]:
    """The nodes of the cluster at RAY_ADDRESS that a run may take; without one this machine, if it has GPUs. Raises
    `ResourceError`."""
    if (nodes := look()) is not None:
        return chosen_nodes(nodes, config)
    import torch  # late: a cluster elsewhere needs none

    if not torch.cuda.is_available():
        return ()
    kind = kind_of_device(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GIB)
    label = {ACCELERATOR: kind.ray_name or kind.name} if kind is not None else {}
    gpus, memory = torch.cuda.device_count(), float(psutil.virtual_memory().total)
    gpus = gpus if config.num_gpus is None else min(gpus, config.num_gpus)
    return [Node("here", "here", "127.0.0.1", gpus=gpus, labels=label, memory=memory)]


def kind_of_device(name: str, memory_gib: float) -> GpuKind | None:
    """The kind of a GPU by its driver's name for it, as in `NVIDIA A100-SXM4-40GB`; None: it is none of those known. Of
    kinds with equal names it is the one whose memory is nearest."""
    words = name.lower().replace(" ", "").replace("-", "")
    named = {kind: kind.name.partition("-4")[0].replace("-", "") for kind in KINDS.values()}
    most = max((len(own) for own in named.values() if own in words), default=0)
    found = [kind for kind, own in named.items() if own in words and len(own) == most]
    return min(found, key=lambda kind: abs(kind.memory_gib - memory_gib), default=None)


def overrides_of(config: RunConfig, keys: Sequence[tuple[str, object]]) -> list[str]:
    """Keys as on the command line, those left out that the run has already."""
    changed = []
    for key, value in keys:
        present: object = config
        for part in key.split("."):
            present = getattr(present, part, None)
        if present != value:
            changed.append(f"{key}={_override_value(value)}")
    return changed


def write_overrides(file: Path, overrides: Sequence[str]) -> None:
    """Write overrides, a line each: `penstock run $(cat FILE)` takes them."""
    file.write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")


def _override_value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_override_value(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
