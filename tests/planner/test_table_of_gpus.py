"""A run of any usual size on any usual GPUs starts, or says in one sentence what would fit. Nodes are made up here."""

import itertools
from collections.abc import Callable

import pytest

from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner import plan_inputs
from penstock.planner.plan_inputs import search_of
from tests.planner.table_of_gpus import CLUSTERS, KINDS, MODELS, WAYS, Outcome, machines_of, outcome, table_of, words_of

Case = tuple[tuple[int, int], int, str, int, float]
MOST_S = 3.0
"""Most seconds of processor time of a plan for one node."""
BORDERS = [
    (model, lora, (0.0, 0.01)[(at + bool(lora)) % 2], gib)
    for at, (model, gib) in enumerate(itertools.product(MODELS, KINDS)) for lora in (0, 32)
]  # fmt: skip


@pytest.fixture
def try_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Outcome]:
    """Plans a run for nodes that it finds."""

    def found(case: Case) -> Outcome:
        cluster, gib, model, lora, kl = case
        nodes: list[Node] = machines_of(cluster, KINDS[gib])
        monkeypatch.setattr(plan_inputs, "look", lambda: nodes)
        return outcome(nodes, *words_of(model, lora, kl))

    return found


@pytest.mark.parametrize(("model", "lora", "kl", "gib"), BORDERS)
def test_a_run_starts_on_the_least_gpus_and_is_refused_on_fewer(
    model: str, lora: int, kl: float, gib: int, try_on: Callable[[Case], Outcome]
) -> None:
    config = load_config(["recipe=gsm8k", *words_of(model, lora, kl)])
    nodes = [machines_of(cluster, KINDS[gib]) for cluster in CLUSTERS]
    least = next(at for at, own in enumerate(nodes) if search_of(config, None, None, own).fits)
    assert try_on((CLUSTERS[least], gib, model, lora, kl)).starts
    if least:
        refused = try_on((CLUSTERS[least - 1], gib, model, lora, kl))
        assert not refused.starts
        assert "a cluster of " in refused.said


@pytest.mark.soak("test_a_run_starts_on_the_least_gpus_and_is_refused_on_fewer")
def test_every_run_of_the_table_starts_or_is_told_what_would_fit(
    try_on: Callable[[Case], Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        (cluster, gib, model, lora, kl)
        for cluster, gib, model, (lora, kl) in itertools.product(CLUSTERS, KINDS, MODELS, WAYS)
    ]
    found = {case: try_on(case) for case in cases}
    with capsys.disabled():
        print(f"\n{table_of(found)}")
    assert len(found) == 480
    for gib, model, (lora, kl) in itertools.product(KINDS, MODELS, WAYS):
        starts = [found[cluster, gib, model, lora, kl].starts for cluster in CLUSTERS]
        assert starts == sorted(starts), "more GPUs never keep a run from starting"
        assert starts[-1]
    assert max(one.planned_s for (cluster, *_), one in found.items() if cluster[0] == 1) <= MOST_S
