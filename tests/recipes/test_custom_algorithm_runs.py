"""Both forms of `recipes/custom_algorithm`, as a user starts them."""

import subprocess
from pathlib import Path

import pytest

import penstock.recipes
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

RECIPE = next(path for root in penstock.recipes.__path__ if (path := Path(root) / "custom_algorithm").is_dir())
SMALL = [
    "warm_start.recipe=null", "model.fresh.num_layers=2", "model.fresh.hidden_size=64",
    "model.fresh.intermediate_size=128", "rollout.engine=hf", "rollout.num_threads=1", "trainer.num_threads=1",
    "reward.function=digits", "reward.options={}", "algorithm.group_size=4", "trainer.max_steps=2",
    "trainer.groups_per_step=4", "trainer.optimizer.lr=1e-3", "evaluation.every_steps=0",
]  # fmt: skip


@pytest.fixture
def trained(warm_python, driver_environment, tmp_path):
    """The metrics of a run started in a process of its own."""

    def run(command, name):
        command = [*warm_python, *command, *SMALL, f"output_dir={tmp_path}", f"name={name}"]
        ended = subprocess.run(command, env=driver_environment, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return metrics_of(tmp_path / name)

    return run


@pytest.mark.promise("Your own algorithm")
def test_the_graph_and_the_for_loop_train_the_same(trained):
    graph = ["-m", "penstock.cli.main", "run", "recipe=custom_algorithm"]
    declarative = trained(graph, "declarative")
    imperative = trained([str(RECIPE / "imperative.py")], "imperative")
    assert len(declarative) == len(imperative) == 2
    for one, other in zip(declarative, imperative, strict=True):
        assert one["actor/grad_norm"] > 0
        for name in ("step", "policy_version", "reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
