"""The proof for `max_staleness=0`: the whole machine, with two engines, and a straight line end with the same bits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.runs import reference_loop
from tests.run_files import metrics_of

pytestmark = pytest.mark.real


@pytest.mark.promise("4")
def test_five_steps_of_the_real_run_equal_the_straight_line_bit_for_bit(tmp_path, cluster):
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128), seed=3)
    lines = [json.dumps({"question": f"{i} and {i * i} are numbers"}) for i in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    config = load_config(
        [
            f"model.path={tmp_path}/model", f"data.path={tmp_path}/prompts.jsonl", "data.columns.answer=null",
            "rollout.engine=hf", "rollout.num_workers=2", "rollout.sampling.max_tokens=12", "rollout.num_threads=1",
            "trainer.num_threads=1", "trainer.share_prefixes=never",
            "reward.function=digits", "trainer.max_steps=5", "trainer.groups_per_step=4", "algorithm.group_size=4",
            "trainer.optimizer.lr=1e-3", "max_staleness=0", f"output_dir={tmp_path}/runs", "name=exact",
        ]
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        expected = reference_loop.train(config, str(tmp_path / "model"))
    finally:
        torch.set_num_threads(threads)
    result = run(config, quiet=True)
    found = load_file(result.model / "model.safetensors")
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(found) == sorted(expected)
    assert any(not torch.equal(found[name], start[name]) for name in found), "nothing was trained"
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different
    metrics = metrics_of(result.directory)
    assert [line["staleness/max"] for line in metrics] == [0.0] * 5
    for engine in ("Rollout-0", "Rollout-1"):  # half of each step's groups
        counts = [line[f"rollout/groups/{engine}"] for line in metrics]
        assert np.diff(counts).tolist() == [2.0] * 4, "the first step's depend on which engine starts first"
    assert all(line["mismatch/logprob_abs_mean"] < 1e-5 for line in metrics)
