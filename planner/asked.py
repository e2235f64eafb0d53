"""What `penstock plan` is asked, as a search: the run, the cluster, the lengths of responses."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.cluster import look
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.memory.known import ACCELERATOR, gpu_bytes, shapes_of
from penstock.orchestrator.configuration.memory.model_shape import ModelShape
from penstock.orchestrator.configuration.memory.run_memory import GIB
from penstock.orchestrator.configuration.prerequisites import starting_model_config
from penstock.planner.hardware import KINDS, GpuKind, Nodes, parse_cluster
from penstock.planner.known_models import known_shape
from penstock.planner.lengths import SIGMA, Lengths
from penstock.planner.search import Search

USUAL_SHARE = 0.4
"""Mean length where nobody says, as a share of rollout.sampling.max_tokens."""
USUAL_PROMPT = 150
"""Tokens of a prompt where nobody says."""
UNCOUNTED = (
    "trainer.engine", "trainer.compile", "trainer.liger", "trainer.activation_offload", "trainer.replay.share",
    "trainer.packing", "trainer.share_prefixes", "rollout.router_replay", "rollout.max_pictures", "environment.name",
    "weights.transport",
)  # fmt: skip
"""Keys that change the seconds of a run, which the cost model leaves out. The only option of an engine that it knows is
the width of its cache."""
CACHE_WIDTH = "kv_cache_dtype"


def search_of(config: RunConfig, cluster: str | None, lengths: str | None, nodes: Sequence[Node] = ()) -> Search:
    """The search. `cluster`: as `2x8:h100`; None: `nodes`, of the cluster that Ray knows. `lengths`: `MEAN` or
    `MEAN:SIGMA` tokens of a response. Raises `ConfigError`, `ResourceError`."""
    flow = dataflow_of(config)
    if cluster is not None:
        found = parse_cluster(cluster)
    else:
        memory = gpu_bytes(config, nodes)
        found = kinds_of(nodes, memory and memory / GIB)
    return Search(config, flow, shapes(config, flow), found, lengths_of(config, lengths))


def shapes(config: RunConfig, flow: Dataflow) -> dict[str, ModelShape]:
    """Sizes of the run's models. Raises `ConfigError` where the policy's are not known."""
    found, model = shapes_of(config, flow), starting_model_config(config)
    if "policy" not in found and model.path is not None and (shape := known_shape(model.path)) is not None:
        found["policy"] = shape
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


def not_counted(config: RunConfig) -> list[str]:
    """Keys that the run sets and whose seconds no plan counts, as on the command line."""
    usual = RunConfig()
    keys = [(key, of(config)) for key in UNCOUNTED if (of := attrgetter(key))(config) != of(usual)]
    options = {key: value for key, value in config.rollout.engine_options.items() if key != CACHE_WIDTH}
    keys += [(f"rollout.engine_options.{key}", value) for key, value in options.items()]
    return [f"{key}={_text(value)}" for key, value in keys]


def hours_of(text: str) -> float:
    """The hours of `hours=H`. Raises `ConfigError`."""
    key, _, value = text.partition("=")
    if key != "hours" or not value.replace(".", "", 1).isdigit():
        raise ConfigError(f"--within {text!r}: write the hours that the run may take, as in hours=12.")
    return float(value)


def kinds_of(nodes: Sequence[Node], gpu_gib: float | None = None) -> tuple[Nodes, ...]:
    """The nodes with GPUs of a Ray cluster, by Ray's label of their kind. `gpu_gib`: memory of GPUs whose kind is not
    known, which are taken to be as fast as the kind with the nearest memory. Raises `ResourceError`."""
    by_label = {kind.ray_name or kind.name: kind for kind in KINDS.values()} | {"A100-80G": KINDS["a100"]}
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
            by_label[label] = replace(
                like, name=f"{label or 'GPU'} as fast as {like.name}", memory_gib=gpu_gib, ray_name=label
            )
        elif label not in by_label:
            raise ResourceError(
                f"A node has GPUs that are not known here ({ACCELERATOR}={label or 'not set'}). Describe the cluster: "
                f"--cluster NxG:KIND, where KIND is {', '.join(sorted(KINDS))} or a YAML file."
            )
    return tuple(Nodes(len(each), gpus, by_label[label], min(each)) for (label, gpus), each in hosts.items())


def nodes_here() -> Sequence[Node]:
    """The nodes of the cluster at RAY_ADDRESS; without one this machine, if it has GPUs."""
    if (nodes := look()) is not None:
        return nodes
    import torch  # late: a cluster elsewhere needs none

    if not torch.cuda.is_available():
        return ()
    kind = kind_called(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GIB)
    label = {ACCELERATOR: kind.ray_name or kind.name} if kind is not None else {}
    return [Node("here", "here", "127.0.0.1", gpus=torch.cuda.device_count(), labels=label)]


def kind_called(name: str, memory_gib: float) -> GpuKind | None:
    """The kind of a GPU by its driver's name for it, as in `NVIDIA A100-SXM4-40GB`; None: it is none of those known. Of
    kinds with equal names it is the one whose memory is nearest."""
    words = name.lower().replace(" ", "").replace("-", "")
    named = {kind: kind.name.partition("-4")[0].replace("-", "") for kind in KINDS.values()}
    most = max((len(own) for own in named.values() if own in words), default=0)
    found = [kind for kind, own in named.items() if own in words and len(own) == most]
    return min(found, key=lambda kind: abs(kind.memory_gib - memory_gib), default=None)


def overrides_of(search: Search, keys: Sequence[tuple[str, object]]) -> list[str]:
    """Keys as on the command line, those left out that the run has already."""
    told = []
    for key, value in keys:
        present: object = search.base
        for part in key.split("."):
            present = getattr(present, part, None)
        if present != value:
            told.append(f"{key}={_text(value)}")
    return told


def write_overrides(file: Path, overrides: Sequence[str]) -> None:
    """Write overrides, a line each: `penstock run $(cat FILE)` takes them."""
    file.write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
