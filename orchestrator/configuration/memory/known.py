"""What is known of a run before it starts: the sizes of its models, and the memory of a GPU."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.model import FreshModelConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.memory.model_shape import ModelShape
from penstock.orchestrator.configuration.prerequisites import starting_model_config
from penstock.workers.fresh_model import vocabulary_size
from penstock.workers.pictures.fresh import FAMILY, vision_config

GIB = 2**30
ACCELERATOR = "ray.io/accelerator-type"
"""Ray's label of a node for the kind of its GPUs."""
GPU_GIB = {
    "V100": 15.8, "T4": 14.6, "A10G": 22.1, "L4": 22.1, "L40S": 44.4, "H100": 79.1, "H200": 139.8, "H20": 95.1,
    "B200": 178.4, "B300": 267.7, "RTX-PRO-6000": 94.9,
}  # fmt: skip
"""GiB that CUDA has of a GPU, by Ray's name of its kind; kinds of which there are several sizes say nothing."""


def shapes_of(config: RunConfig, flow: Dataflow, *, may_fetch: bool = False) -> dict[str, ModelShape]:
    """Sizes of the models that can be told, by name; the policy's under `policy`. `may_fetch`: a config.json may be
    fetched from the hub."""
    model = starting_model_config(config)
    found = {"policy": _fresh(model.fresh) if model.path is None else _read(model.path, may_fetch)}
    if model.reference_path is not None:
        found["reference"] = _read(model.reference_path, may_fetch)
    names = {str(stage.model) for stage in flow.stages if stage.model is not None}
    found |= {name: _read(path, may_fetch) for name, path in model.paths.items() if name in names}
    return {name: shape for name, shape in found.items() if shape is not None}


def gpu_bytes(config: RunConfig, nodes: Sequence[Node] = (), plan: Sequence[ActorPlan] = ()) -> float | None:
    """Memory of the smallest GPU that the run may get; None: there is none, or nobody says. `nodes`: of the cluster;
    empty: the run's GPUs are this machine's. `plan`: actors, whose labels say which nodes they may get; empty: all."""
    if not (config.trainer.num_gpus_per_rank or config.rollout.num_gpus_per_worker):
        return None
    if config.cluster.gpu_memory_gib is not None:
        return config.cluster.gpu_memory_gib * GIB
    if not nodes:
        return _of_this_machine()
    labels = [config.cluster.labels.get(role, {}) for role in {actor.role for actor in plan if actor.num_gpus}] or [{}]
    open_nodes = [node for node in nodes if node.gpus and any(node.has(own) for own in labels)]
    kinds = [node.labels.get(ACCELERATOR, "") for node in open_nodes]
    if not kinds or not all(kind in GPU_GIB for kind in kinds):
        return _of_this_machine() if len(nodes) == 1 else None
    return min(GPU_GIB[kind] for kind in kinds) * GIB


def _of_this_machine() -> float | None:
    import torch  # late: all else needs none

    if not torch.cuda.is_available():
        return None
    return float(
        min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
    )


def _fresh(model: FreshModelConfig) -> ModelShape | None:
    kind = "qwen3_moe" if model.num_experts else "qwen2"
    return ModelShape.of(
        {
            "model_type": FAMILY if model.num_vision_layers else kind,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "vocab_size": vocabulary_size(model),
            "tie_word_embeddings": True,
            "max_position_embeddings": model.max_position_embeddings,
            **(vision_config(model, first_id=0) if model.num_vision_layers else {}),
        }
    )


def _read(path: str, may_fetch: bool) -> ModelShape | None:
    """The sizes that a config.json says; None where there is none, or it says something else. Whether the model is as
    it should be is told by others."""
    values: Any = None
    with contextlib.suppress(OSError, ValueError):
        directory = Path(path).expanduser()
        file = directory / "config.json" if directory.is_dir() else _of_hub(path, may_fetch)
        values = json.loads(Path(file).read_text(encoding="utf-8")) if file else None
    return ModelShape.of(values) if isinstance(values, Mapping) else None


def _of_hub(name: str, may_fetch: bool) -> str | None:
    """The config.json of a hub's model in the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if may_fetch:
        return str(hf_hub_download(name, "config.json"))
    found = try_to_load_from_cache(name, "config.json")
    return found if isinstance(found, str) else None
