"""The recipe of a mixture of 30B fits eight GPUs of 80 GiB, as it is and as it is planned."""

import json
from pathlib import Path

import pytest

from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, MemoryView
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.run_memory import GIB
from penstock.planner import plan_inputs
from penstock.planner.planned_runs import planned
from tests.orchestrator.configuration.memory.shapes import QWEN3_30B_A3B

LORA, OF_EXPERTS = "trainer.lora.rank=32", "trainer.lora.target_modules=[all-linear,gate_up_proj,down_proj]"
ALL = "trainer.lora.rank=0"


@pytest.mark.parametrize("plan", ["auto", "never"])
@pytest.mark.parametrize(
    ("word", "host_gib", "is_kept"), [(LORA, 150, True), (OF_EXPERTS, 200, True), (ALL, 1000, False)]
)
def test_a_mixture_of_30b_fits_eight_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, word: str, host_gib: int, is_kept: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    nodes = [Node("0", "n0", "10.0.0.1", 64, 8, {ACCELERATOR: "H100"}, host_gib * GIB)]
    monkeypatch.setattr(plan_inputs, "look", lambda: nodes)
    told = list[str]()
    asked = resolve(load_config(["recipe=moe_30b", f"model.path={tmp_path}", f"plan={plan}", word]))
    run = planned(asked, told.append)
    assert [line.startswith("plan for 1x8:h100: colocated, ") for line in told] == [True] * (plan == "auto")
    view = MemoryView.of(run, nodes, assign(run.plan, nodes, run.config))
    assert "of a GPU's 79.1 GiB" in view.summary()  # which raises for what does not fit
    assert ("faults.keep_state=false" in view.summary()) is not is_kept
    assert view.memory is not None
    assert view.memory.shapes["policy"].num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert run.config.trainer.num_ranks == 8
