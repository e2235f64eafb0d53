"""A tiny model and prompts for whole runs."""

import json

import pytest

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.observability.reporting import report
from penstock.workers.fresh_model import build_fresh_model

SMALL_MODEL = FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2)
"""Heads of 32: the smallest that vLLM's attention takes on a CPU."""


@pytest.fixture(autouse=True)
def without_pngs(request, monkeypatch):
    """Drawing them takes a second of each run. They are looked at in `reporting/` and after the runs marked `pngs`."""
    if request.node.get_closest_marker("real") and not request.node.get_closest_marker("pngs"):
        monkeypatch.setattr(report, "write_pngs", lambda *_: [])


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Words of a run that takes seconds: add `output_dir`, an engine and what the test is about."""
    folder = tmp_path_factory.mktemp("small")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    lines = [json.dumps({"question": f"{i} and {i * i} are numbers", "answer": str(i)}) for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return [
        f"model.path={folder}/model", f"data.path={folder}/prompts.jsonl", "rollout.max_model_len=64",
        "rollout.sampling.max_tokens=12", "reward.function=digits", "trainer.groups_per_step=4",
        "algorithm.group_size=4", "rollout.kv_cache_gib=0.1", "trainer.optimizer.lr=1e-3",
        "rollout.num_threads=1", "trainer.num_threads=1",  # else the run tries how many are fastest
    ]  # fmt: skip
