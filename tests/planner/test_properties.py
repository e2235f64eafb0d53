"""What has to be so on any small cluster: more of a resource never makes the best plan slower, and a plan that is
called feasible starts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, gpu_bytes
from penstock.orchestrator.configuration.run_memory import RunMemory, choose_auto
from penstock.planner.hardware import KINDS, GpuKind, Nodes
from penstock.planner.plan_inputs import overrides_of, search_of
from penstock.planner.search import Plan, Search
from tests.amounts import amount
from tests.orchestrator.cluster.placement.clusters import node

CPUS_PER_GPU = 12
FEW = settings(max_examples=amount(8), deadline=None, phases=(Phase.explicit, Phase.generate))
"""A search takes a tenth of a second, and what fails is small as it is."""
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", "Qwen/Qwen3-30B-A3B")
RUNS = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from((16, 64)).map("trainer.groups_per_step={}".format),
    st.sampled_from((0.0, 0.01)).map("algorithm.kl_coef={}".format),
    st.integers(0, 2).map("max_staleness={}".format),
)
UNMEASURED = [replace(kind, name=f"{name} on paper") for name, kind in sorted(KINDS.items())]
"""Kinds that no table of kernels knows: one that is faster on paper is."""
NODES = st.builds(
    Nodes,
    count=st.integers(1, 2),
    gpus=st.sampled_from((1, 2, 4)),
    kind=st.sampled_from(UNMEASURED),
)


@cache
def loaded(words: tuple[str, ...]) -> RunConfig:
    return load_config(words)


def words_of(run: tuple[str, ...]) -> tuple[str, ...]:
    return ("recipe=gsm8k", "rollout.max_model_len=4608", "rollout.sampling.max_tokens=4096", f"model.path={run[0]}",
            *run[1:])  # fmt: skip


def search_on(run: tuple[str, ...], *cluster: Nodes, lengths: str = "800") -> Search:
    return replace(search_of(loaded(words_of(run)), "1x1:h100", lengths), cluster=cluster)


def more_of(nodes: Nodes) -> dict[str, Nodes]:
    """Nodes that have more of something, by what it is."""
    kind = nodes.kind
    return {
        "nodes": replace(nodes, count=nodes.count + 1),
        "memory": replace(nodes, kind=replace(kind, memory_gib=kind.memory_gib * 1.3)),
        "links": replace(nodes, kind=replace(kind, link=kind.link * 2, network=kind.network * 2)),
        "bandwidth": replace(nodes, kind=replace(kind, bandwidth=kind.bandwidth * 1.5)),
        "FLOPs": replace(nodes, kind=replace(kind, flops=kind.flops * 1.5)),
    }


@FEW
@given(run=RUNS, nodes=NODES, what=st.sampled_from(sorted(more_of(Nodes(1, 1, KINDS["h100"])))))
def test_more_of_a_resource_never_makes_the_best_plan_slower(run: tuple[str, ...], nodes: Nodes, what: str) -> None:
    if before := search_on(run, nodes).plans:
        assert search_on(run, more_of(nodes)[what]).plans[0].step_s <= before[0].step_s * 1.001


def label_of(kind: GpuKind) -> str:
    """Label of a node with GPUs of a kind: Ray's own, or one that its owner gives it."""
    return kind.ray_name or kind.name


def machines(cluster: Sequence[Nodes]) -> list[Node]:
    """A driver's node without GPUs, and the nodes of a cluster."""
    found = [node(0)]
    for nodes in cluster:
        for _ in range(nodes.count):
            labels = {ACCELERATOR: label_of(nodes.kind)}
            found.append(node(len(found), CPUS_PER_GPU * nodes.gpus, nodes.gpus, **labels))
    return found


def check_starts(run: tuple[str, ...], search: Search, plan: Plan) -> None:
    """Check that what the plan's overrides say is the run that was planned, which fits the nodes and their GPUs."""
    config, nodes = loaded((*words_of(run), *overrides_of(search.base, plan.candidate.keys))), machines(search.cluster)
    assert config == plan.candidate.config(search.base)
    actors = plan_actors(search.flow, config)
    on = assign(actors, nodes, config).node_of
    kinds = Counter(on[actor.name].labels[ACCELERATOR] for actor in actors if actor.role == "rollout")
    assert kinds == Counter({label_of(kind): count for kind, count in plan.candidate.engines})
    ranks = {on[actor.name].labels[ACCELERATOR] for actor in actors if actor.role in ("trainer", "scorer")}
    assert ranks == {label_of(plan.candidate.ranks)}
    memory = choose_auto(RunMemory(config, search.flow, search.shapes, gpu_bytes(config, nodes, actors)))
    memory.check()
    assert memory.peaks() == pytest.approx(plan.memory.peaks())
    assert memory.config.trainer == plan.config.trainer


@FEW
@given(run=RUNS, cluster=st.lists(NODES, min_size=1, max_size=2, unique_by=lambda nodes: nodes.kind.name))
def test_a_plan_that_is_called_feasible_starts(run: tuple[str, ...], cluster: list[Nodes]) -> None:
    search = search_on(run, *cluster)
    for plan in search.best()[:2] + search.plans[-1:]:
        check_starts(run, search, plan)
