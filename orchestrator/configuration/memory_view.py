"""The memory that a run needs: what is known of its models and GPUs, tables for `penstock validate`, and the refusal of
what does not fit.

    config.json ─▶ shapes_of ─▶ RunMemory, with what is `auto` chosen ─▶ MemoryView: tables, one line, refusal
                                                                     └▶ resolve_auto: a run's configuration and actors
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, needed
from penstock.orchestrator.cluster.placement.assignment import Assignment
from penstock.orchestrator.cluster.placement.nodes import Node, titles
from penstock.orchestrator.cluster.ray_cluster import count_local_gpus
from penstock.orchestrator.configuration.model_shape import ModelShape, fresh_shape
from penstock.orchestrator.configuration.prerequisites import starting_model_config
from penstock.orchestrator.configuration.rank_memory import PARTS
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.configuration.run_memory import (
    CACHE,
    GIB,
    HostPart,
    RunMemory,
    choose_auto,
    chosen,
    host_parts,
    reserved_bytes,
)

ACCELERATOR = "ray.io/accelerator-type"
"""Ray's label of a node for the kind of its GPUs."""
GPU_GIB = {
    "V100": 15.8, "T4": 14.6, "A10G": 22.1, "L4": 22.1, "L40S": 44.4, "H100": 79.1, "H200": 139.8, "H20": 95.1,
    "B200": 178.4, "B300": 267.7, "RTX-PRO-6000": 94.9,
}  # fmt: skip
"""GiB that CUDA has of a GPU, by Ray's name of its kind; kinds of which there are several sizes say nothing."""


def shapes_of(config: RunConfig, flow: Dataflow, *, may_fetch: bool = False) -> dict[str, ModelShape]:
    """Sizes of the models whose sizes are known, by name; the policy's under `policy`. `may_fetch`: a config.json may
    be fetched from the hub."""
    model = starting_model_config(config)
    found = {"policy": fresh_shape(model.fresh) if model.path is None else _read(model.path, may_fetch)}
    if model.reference_path is not None:
        found["reference"] = _read(model.reference_path, may_fetch)
    names = {str(stage.model) for stage in flow.stages if stage.model is not None}
    found |= {name: _read(path, may_fetch) for name, path in model.paths.items() if name in names}
    return {name: shape for name, shape in found.items() if shape is not None}


def gpu_bytes(config: RunConfig, nodes: Sequence[Node] = (), plan: Sequence[ActorPlan] = ()) -> float | None:
    """Memory of the smallest GPU that the run may get; None: there is none, or its memory is unknown. `nodes`: of the
    cluster; empty: the run's GPUs are this machine's. `plan`: actors, whose labels say which nodes they may get; empty:
    all."""
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
        here = nodes[0].labels.get(ACCELERATOR)  # of the driver's node
        return _of_this_machine() if len(nodes) == 1 or (here and {here} == {*kinds}) else None
    return min(GPU_GIB[kind] for kind in kinds) * GIB


def _of_this_machine() -> float | None:
    import torch  # late: all else needs none

    if not torch.cuda.is_available():
        return None
    return float(
        min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
    )


def _read(path: str, may_fetch: bool) -> ModelShape | None:
    """The sizes that a config.json says; None where there is none, or transformers makes no model of it. `check_model`
    refuses a directory that is no model."""
    values = _config_of(path, may_fetch)
    if values is None or (shape := ModelShape.of(values)) is not None:
        return None if values is None else shape
    from penstock.orchestrator.configuration.measured_shape import measured_shape  # late: all else needs no torch

    return measured_shape(values)


def _why_unknown(config: RunConfig, may_fetch: bool) -> str:
    """The reason why the policy has no shape."""
    path = str(starting_model_config(config).path)
    values = _config_of(path, may_fetch)
    if values is None:
        return f"unknown: {path} has no config.json on this machine"
    kind = values.get("model_type")
    return f"unknown: {path} is of type {kind!r}, of which transformers makes no decoder with attention by heads"


def _config_of(path: str, may_fetch: bool) -> Mapping[str, Any] | None:
    values: Any = None
    with contextlib.suppress(OSError, ValueError):
        directory = Path(path).expanduser()
        file = directory / "config.json" if directory.is_dir() else _of_hub(path, may_fetch)
        values = json.loads(Path(file).read_text(encoding="utf-8")) if file else None
    return values if isinstance(values, Mapping) else None


def _of_hub(name: str, may_fetch: bool) -> str | None:
    """The config.json of a hub's model in the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if may_fetch:
        return str(hf_hub_download(name, "config.json"))
    found = try_to_load_from_cache(name, "config.json")
    return found if isinstance(found, str) else None


CACHED = "keys and values"


@dataclass(frozen=True)
class MemoryView:
    """The memory of one run. Without `memory` nothing is known of it."""

    plan: Sequence[ActorPlan]
    memory: RunMemory | None
    chosen: Sequence[str] = ()
    """Keys that were `auto`, with what was chosen."""
    nodes: Sequence[Node] = ()
    assignment: Assignment | None = None
    why_unknown: str = ""
    """The reason why there is no `memory`."""

    @classmethod
    def of(
        cls,
        run: ResolvedRun,
        nodes: Sequence[Node] = (),
        assignment: Assignment | None = None,
        *,
        may_fetch: bool = False,
    ) -> "MemoryView":
        """`nodes`: of the cluster; empty: the run starts a local Ray. Reads models' config.json."""
        shapes = shapes_of(run.config, run.flow, may_fetch=may_fetch)
        if "policy" not in shapes:
            return cls(run.plan, None, (), nodes, assignment, _why_unknown(run.config, may_fetch))
        memory = choose_auto(RunMemory(run.config, run.flow, shapes, gpu_bytes(run.config, nodes, run.plan)))
        return cls(run.plan, memory, chosen(run.config, memory.config), nodes, assignment)

    def summary(self) -> str:
        """Describe it in a few words. Raises `ResourceError` for what does not fit, with the keys to change."""
        if self.memory is None:
            return self.why_unknown
        self.memory.check()
        self._check_host()
        peaks = [f"{what} {_gib(peak)}" for what, peak in self.memory.peaks().items()]
        known = self.memory.gpu_bytes
        told = [", ".join(peaks) + (f" of a GPU's {_gib(known)} GiB" if known else " GiB")] if peaks else []
        if peaks and not known:
            told.append("how much a GPU has is not known here, and cluster.gpu_memory_gib can say it")
        told.append(f"host {', '.join(f'{_gib(_sum(parts))} GiB' for _, parts in self._hosts())}")
        if self.chosen:
            told.append(f"chosen: {' '.join(self.chosen)}")
        return "; ".join(told)

    def devices(self) -> Table | None:
        """A table of one rank of each model and one engine, by part."""
        if self.memory is None:
            return None
        ranks, engine = self.memory.ranks, self.memory.engine
        what = "one GPU" if self.memory.config.trainer.num_gpus_per_rank else "one process"
        columns = {name: dict(one.parts) for name, one in ranks.items()}
        if engine:
            columns["engine"] = {"weights": engine.weights, "activations": engine.step, CACHED: max(0.0, engine.cache)}
        table = _table(f"GiB of {what}", *columns)
        is_copied = ranks["policy"].parts["publication"] > 0
        for part in PARTS if is_copied else PARTS[:-1]:
            table.add_row(part, *(_gib(parts.get(part, 0.0)) for parts in columns.values()))
        if engine:
            table.add_row(CACHED, *("" for _ in ranks), _gib(columns["engine"][CACHED]))
        table.add_row("peak", *(_gib(sum(parts.values())) for parts in columns.values()), style="bold")
        table.add_row("is in", *(one.moment for one in ranks.values()), *([""] if engine else []))
        return table

    def remarks(self) -> list[str]:
        """Sentences that go with the tables."""
        if self.memory is None:
            return []
        config, engine = self.memory.config, self.memory.engine
        recomputed = "recomputed" if config.trainer.recomputes_layers else "kept"
        told = [f"Micro-batches of {config.trainer.microbatch_tokens:,} tokens, activations {recomputed}."]
        if engine and engine.cache > 0:
            tokens, longest = engine.cache_tokens, config.rollout.max_model_len
            told.append(f"An engine has keys and values of {tokens:,} tokens: {tokens // longest:,} longest sequences.")
        record, longest = self.memory.shapes["policy"].record_bytes, config.rollout.max_model_len
        if config.rollout.router_replay and record:
            told.append(
                f"Routed experts are {record:,} bytes a token, {record * longest / 2**20:,.1f} MiB a longest sequence: "
                f"store.max_bytes has room for those of {config.store.max_bytes // (record * longest):,}."
            )
        return told

    def hosts(self) -> Table | None:
        """A table of host memory by part, a column a node; nodes that hold the same are one."""
        if self.memory is None:
            return None
        columns = self._hosts()
        table = _table("GiB of host memory", "where", *(name for name, _ in columns))
        rows = dict.fromkeys((part.name, part.place) for _, parts in columns for part in parts)
        for name, place in rows:
            amounts = [sum(part.num_bytes for part in parts if part.name == name) for _, parts in columns]
            table.add_row(name, place, *(_gib(amount) if amount else "" for amount in amounts))
        for place in dict.fromkeys(place for _, place in rows):
            sums = [_gib(_sum(parts, place)) for _, parts in columns]
            table.add_row(f"in all, {place}", "", *sums, style="bold")
        return table

    def _hosts(self) -> list[tuple[str, list[HostPart]]]:
        """Names of nodes that hold the same, and what."""
        assert self.memory is not None
        if self.assignment is None:
            return [("this machine", host_parts(self.memory, self.plan))]
        by_parts: dict[tuple[HostPart, ...], list[str]] = {}
        names, used = titles(self.nodes), self.assignment.nodes
        for node in used:
            there = set(self.assignment.names_on(node))
            actors = [actor for actor in self.plan if actor.name in there]
            parts = tuple(host_parts(self.memory, actors, len(used), is_own=False))
            by_parts.setdefault(parts, []).append(names[node.id])
        return [(", ".join(alike) if len(alike) < 3 else f"{alike[0]} and {len(alike) - 1} like it", list(parts))
                for parts, alike in by_parts.items()]  # fmt: skip

    def _check_host(self) -> None:
        """Raise `ResourceError` where the run would be on this machine alone, which could never hold what it cannot do
        without."""
        if self.assignment is not None or needed(self.plan)[1] > count_local_gpus():
            return
        (_, parts), *_ = self._hosts()
        check_host(parts, psutil.virtual_memory().total, "this machine has")


def resolve_auto(run: ResolvedRun, nodes: Sequence[Node], tell: Callable[[str], None]) -> ResolvedRun:
    """The run on the cluster that it has connected to: what was `auto` is chosen, and each actor reserves its memory.
    Raises `ResourceError` for what does not fit its GPUs."""
    chosen_run = replace(run, config=_chosen_config(run, nodes, tell))
    return replace(chosen_run, plan=with_memory(chosen_run, nodes))


def _chosen_config(run: ResolvedRun, nodes: Sequence[Node], tell: Callable[[str], None]) -> RunConfig:
    if gpu_bytes(run.config, nodes, run.plan) is None:
        return run.config
    view = MemoryView.of(run, nodes, may_fetch=True)
    if view.memory is None:
        tell(f"memory: {view.why_unknown}")
        return run.config
    view.memory.check()
    if view.chosen:
        tell(f"memory: {' '.join(view.chosen)}, as fits a GPU of {_gib(view.memory.gpu_bytes or 0)} GiB")
    return view.memory.config


def with_memory(run: ResolvedRun, nodes: Sequence[Node]) -> list[ActorPlan]:
    """The plan, with the memory that each actor reserves (`cluster.reserve_memory`). `nodes`: of the cluster."""
    memory = MemoryView.of(run, nodes).memory if run.config.cluster.reserve_memory else None
    if memory is None:
        return run.plan
    of_cpu = min((node.memory / node.cpus for node in nodes if node.cpus), default=0.0)
    return [
        replace(actor, memory=int(min(reserved_bytes(memory, actor), actor.num_cpus * of_cpu))) for actor in run.plan
    ]


def required_bytes(parts: Sequence[HostPart]) -> float:
    """Bytes of host memory that a node cannot do without."""
    return _sum([part for part in parts if part.place != CACHE and not part.is_optional])


def check_host(parts: Sequence[HostPart], total: float, who_has: str) -> None:
    """Raise `ResourceError` where a node could never hold what it cannot do without. `total`: bytes of its memory."""
    if (wanted := required_bytes(parts)) > total:
        largest = [part for part in parts if part.place != CACHE and not part.is_optional and part.key][:2]
        raise ResourceError(
            f"the run needs {_gib(wanted)} GiB of host memory, and {who_has} {_gib(total)}: "
            f"{' and '.join(f'{_gib(part.num_bytes)} for {part.name} ({part.key})' for part in largest)}. Change "
            "these keys, or take a machine with more."
        )


def _sum(parts: Sequence[HostPart], place: str | None = None) -> float:
    return sum(part.num_bytes for part in parts if place in (None, part.place))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column == "where" else "right")
    return table
