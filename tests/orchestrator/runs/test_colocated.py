"""Engines and trainers that take turns on the same devices train what those with devices of their own train."""

import pytest
from safetensors.torch import load_file

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run

pytestmark = pytest.mark.real


@pytest.mark.parametrize("engine", [pytest.param("hf", marks=pytest.mark.promise("4 colocated")), "vllm"])
def test_taking_turns_changes_no_bit(small_run, tmp_path, cluster, engine):
    words = [*small_run, f"rollout.engine={engine}", "rollout.num_threads=1", "trainer.num_threads=1",
             "trainer.max_steps=3", f"output_dir={tmp_path}"]  # fmt: skip
    apart = run(load_config([*words, "name=apart"]), quiet=True)
    together = run(load_config([*words, "name=together", "placement=colocated"]), quiet=True)
    expected, found = (load_file(result.model / "model.safetensors") for result in (apart, together))
    assert not [name for name in expected if not expected[name].equal(found[name])]
