"""The memory that a run needs: what is known of its models and GPUs, tables for `penstock validate`, and the refusal of
what does not fit.

    config.json ─▶ shapes_of ─▶ RunMemory, with what is `auto` chosen ─▶ MemoryView: tables, one line, refusal
                                                                     └▶ resolve_auto: a run's configuration and actors
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
from rich.table import Table

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.checks import AUTO
from penstock.conf.errors import ResourceError
from penstock.conf.rollout import DRAFT
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, needed
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign
from penstock.orchestrator.cluster.placement.nodes import Node, titles
from penstock.orchestrator.cluster.ray_cluster import count_local_gpus, is_elsewhere
from penstock.orchestrator.configuration.model_shape import ModelShape, fresh_shape, read_config
from penstock.orchestrator.configuration.prerequisites import starting_model_config
from penstock.orchestrator.configuration.rank_memory import PARTS
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.configuration.run_memory import (
    CACHE,
    GIB,
    KEPT,
    KEPT_OF_OTHERS,
    SHARED,
    HostPart,
    RunMemory,
    choose_auto,
    chosen,
    host_parts,
    reserved_bytes,
    with_values,
)
from penstock.store.data.roots import SHARED_MEMORY

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
    names = {str(stage.model) for stage in flow.stages if stage.model is not None} | {*config.trainer.own_models}
    names |= {config.rollout.speculation.method} & {DRAFT}
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
    values = read_config(path, may_fetch=may_fetch)
    if values is None or (shape := ModelShape.of(values)) is not None:
        return None if values is None else shape
    from penstock.orchestrator.configuration.measured_shape import measured_shape  # late: all else needs no torch

    return measured_shape(values)


def _why_unknown(config: RunConfig, may_fetch: bool) -> str:
    """The reason why the policy has no shape."""
    path = str(starting_model_config(config).path)
    values = read_config(path, may_fetch=may_fetch)
    if values is None:
        return f"unknown: {path} has no config.json on this machine"
    kind = values.get("model_type")
    return f"unknown: {path} is of type {kind!r}, of which transformers makes no decoder with attention by heads"


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
    why_not_kept: str = ""
    """The reason why ranks keep no copies of their state, where `faults.keep_state=auto` would have them."""

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
        view = cls(run.plan, memory, chosen(run.config, memory.config), nodes, assignment)
        if (why := view._lacks_room_for_copies()) is None:
            return view
        return replace(view, memory=with_values(memory, "faults", keep_state=False), why_not_kept=why)

    def _lacks_room_for_copies(self) -> str | None:
        """The first node that cannot hold the copies that ranks would keep of their state beside all that the run needs
        there, in a sentence; None: all can, or it is not known, or the copies were asked for."""
        if self.memory is None or self.memory.config.faults.keep_state != AUTO:
            return None
        for who_has, parts, total, shared in self._rooms():
            copies = sum(part.num_bytes for part in parts if part.name in (KEPT, KEPT_OF_OTHERS))
            in_shared = _sum([part for part in parts if not part.is_optional], SHARED)
            room, where = min((total - required_host_bytes(parts), "memory"), (shared - in_shared, SHARED))
            if copies > room:
                return (
                    f"copies of the state are {_gib(copies)} GiB, and {who_has} {_gib(max(0.0, room))} GiB of {where} "
                    "beside what the run needs: with faults.keep_state=false, the death of a rank is a return to the "
                    "newest checkpoint"
                )
        return None

    def _rooms(self) -> list[tuple[str, list[HostPart], float, float]]:
        """Each node whose memory is known: who has it, in words, what lies there, and its bytes of memory and of
        shared memory."""
        assert self.memory is not None
        if self.assignment is not None:
            names, used = titles(self.nodes), self.assignment.nodes
            return [(f"{names[node.id]} has", self._parts_on(node), node.memory or math.inf, math.inf) for node in used]
        if is_elsewhere() or needed(self.plan)[1] > count_local_gpus():
            return []
        total, shared = psutil.virtual_memory().total, shutil.disk_usage(SHARED_MEMORY).total
        return [("this machine has", host_parts(self.memory, self.plan), total, shared)]

    def summary(self) -> str:
        """Describe it in a few words. Raises `ResourceError` for what does not fit, with the keys to change."""
        if self.memory is None:
            return self.why_unknown
        self.memory.check()
        self.check_nodes()
        peaks = [f"{what} {_gib(peak)}" for what, peak in self.memory.peaks().items()]
        known = self.memory.gpu_bytes
        told = [", ".join(peaks) + (f" of a GPU's {_gib(known)} GiB" if known else " GiB")] if peaks else []
        if peaks and not known:
            told.append("how much a GPU has is not known here, and cluster.gpu_memory_gib can say it")
        told.append(f"host {', '.join(f'{_gib(_sum(parts))} GiB' for _, parts in self._hosts())}")
        told += [self.why_not_kept] * bool(self.why_not_kept)
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
        is_copied = self.memory.trained[0].parts["publication"] > 0
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
        if engine and config.rollout.speculation.method == DRAFT:
            counted = "An engine's weights, keys and values are the draft model's, too."
            told.append(
                counted if DRAFT in self.memory.shapes else "The draft model is not counted: its sizes are unknown."
            )
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
        names = titles(self.nodes)
        for node in self.assignment.nodes:
            by_parts.setdefault(tuple(self._parts_on(node)), []).append(names[node.id])
        return [(", ".join(alike) if len(alike) < 3 else f"{alike[0]} and {len(alike) - 1} like it", list(parts))
                for parts, alike in by_parts.items()]  # fmt: skip

    def _parts_on(self, node: Node) -> list[HostPart]:
        assert self.memory is not None
        assert self.assignment is not None
        there = set(self.assignment.names_on(node))
        actors = [actor for actor in self.plan if actor.name in there]
        return host_parts(self.memory, actors, len(self.assignment.nodes), is_own=False)

    def check_nodes(self) -> None:
        """Raise `ResourceError` where the run would be on this machine alone, which could never hold what it cannot do
        without, and for a node that cannot hold copies of the state that were asked for."""
        if self.memory is None:
            return
        if self.assignment is None and needed(self.plan)[1] <= count_local_gpus():
            check_host(host_parts(self.memory, self.plan), psutil.virtual_memory().total, "this machine has")
        elif self.memory.config.faults.keep_state is True:
            for who_has, parts, total, _ in self._rooms():
                check_host(parts, total, who_has)


def resolve_auto(run: ResolvedRun, nodes: Sequence[Node], tell: Callable[[str], None]) -> ResolvedRun:
    """The run on the cluster that it has connected to: what was `auto` is chosen, and each actor reserves its memory.
    Raises `ResourceError` for what does not fit its GPUs."""
    chosen_run = replace(run, config=_chosen_config(run, nodes, tell))
    return replace(chosen_run, plan=with_memory(chosen_run, nodes))


def _chosen_config(run: ResolvedRun, nodes: Sequence[Node], tell: Callable[[str], None]) -> RunConfig:
    has_gpus = gpu_bytes(run.config, nodes, run.plan) is not None
    view = MemoryView.of(run, nodes, _assigned(run, nodes), may_fetch=has_gpus)
    if view.memory is None:
        if has_gpus:
            tell(f"memory: {view.why_unknown}")
        return run.config
    view.memory.check()
    view.check_nodes()
    if view.chosen:
        tell(f"memory: {' '.join(view.chosen)}, as fits a GPU of {_gib(view.memory.gpu_bytes or 0)} GiB")
    if view.why_not_kept:
        tell(f"memory: {view.why_not_kept}")
    return view.memory.config


def _assigned(run: ResolvedRun, nodes: Sequence[Node]) -> Assignment | None:
    """The nodes that actors would have on a cluster; None on this machine alone, and for a run that waits for nodes."""
    with contextlib.suppress(ResourceError):
        return assign(run.plan, nodes, run.config) if is_elsewhere() else None
    return None


def with_memory(run: ResolvedRun, nodes: Sequence[Node]) -> list[ActorPlan]:
    """The plan, with the memory that each actor reserves (`cluster.reserve_memory`). `nodes`: of the cluster."""
    memory = MemoryView.of(run, nodes).memory if run.config.cluster.reserve_memory else None
    if memory is None:
        return run.plan
    of_cpu = min((node.memory / node.cpus for node in nodes if node.cpus), default=0.0)
    return [
        replace(actor, memory=int(min(reserved_bytes(memory, actor), actor.num_cpus * of_cpu))) for actor in run.plan
    ]


def required_host_bytes(parts: Sequence[HostPart]) -> float:
    """Bytes of host memory that a node cannot do without."""
    return _sum([part for part in parts if part.place != CACHE and not part.is_optional])


def check_host(parts: Sequence[HostPart], total: float, who_has: str) -> None:
    """Raise `ResourceError` where a node could never hold what it cannot do without. `total`: bytes of its memory."""
    if (wanted := required_host_bytes(parts)) > total:
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
