"""Configurations of verl and TRL become recipes that load; no key is passed over, and the page tells of all of them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ConfigError
from penstock.orchestrator.cli import main
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.keys import sections
from penstock.orchestrator.configuration.translation.rules import Framework, table
from penstock.orchestrator.configuration.translation.trl import TRL
from penstock.orchestrator.configuration.translation.verl import VERL
from penstock.orchestrator.configuration.translation.view import as_yaml, read, translated

PAGE = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
VERL_GSM8K = """set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/gsm8k/train.parquet \\
    data.val_files=/data/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.total_epochs=15 $@
"""
TRL_GSM8K = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: openai/gsm8k
dataset_config: main
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_completion_length: 512
learning_rate: 1.0e-6
beta: 0.01
epsilon: 0.2
epsilon_high: 0.28
max_steps: 200
warmup_ratio: 0.1
use_vllm: true
vllm_mode: colocate
loss_type: bnpo
mask_truncated_completions: true
no_such_key: 3
"""


def recipe_of(tmp_path: Path, name: str, text: str) -> dict[str, str]:
    """Translate a file into a recipe, and return what was lost."""
    (tmp_path / name).write_text(text)
    framework, found = translated(read(str(tmp_path / name)))
    (tmp_path / "recipe.yaml").write_text(as_yaml(framework, found))
    return dict(found.lost)


def test_verls_gsm8k_is_a_recipe(tmp_path: Path) -> None:
    lost = recipe_of(tmp_path, "run.sh", VERL_GSM8K)
    assert sorted(lost) == ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.total_epochs"]
    assert "set trainer.max_steps to 15 x rows" in lost["trainer.total_epochs"]
    config = load_config([f"recipe={tmp_path}"])
    assert (config.data.path, config.data.split, config.evaluation.path) == ("/data/gsm8k", "train", "test")
    assert (config.data.columns.prompt, config.data.columns.answer) == ("prompt", "reward_model.ground_truth")
    assert (config.data.max_prompt_tokens, config.data.too_long) == (512, "skip")
    assert (config.rollout.sampling.max_tokens, config.rollout.max_model_len) == (1024, 1536)
    assert (config.trainer.groups_per_step, config.trainer.num_minibatches) == (1024, 4)
    assert (config.algorithm.name, config.algorithm.group_size) == ("grpo", 5)
    assert (config.algorithm.kl_coef, config.trainer.optimizer.lr) == (0.001, 1e-6)
    assert (config.placement, config.trainer.num_ranks, config.rollout.num_workers) == ("colocated", 8, 4)
    assert (config.rollout.tensor_parallel_size, config.checkpoint.every_steps) == (2, 20)
    assert config.tracking.sinks == ["ray", "wandb"]


def test_trls_gsm8k_is_a_recipe(tmp_path: Path) -> None:
    lost = recipe_of(tmp_path, "grpo.yaml", TRL_GSM8K)
    assert sorted(lost) == ["no_such_key"]

    assert "not known" in lost["no_such_key"]
    config = load_config([f"recipe={tmp_path}"])
    assert (config.data.source, config.data.path, config.data.subset) == ("huggingface", "openai/gsm8k", "main")
    assert config.rollout.truncated == {"length": "mask"}
    assert (config.algorithm.group_size, config.trainer.groups_per_step, config.trainer.num_minibatches) == (8, 8, 1)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (0.2, 0.28, 0.01)
    assert (config.trainer.max_steps, config.trainer.optimizer.warmup_steps) == (200, 20)
    assert (config.rollout.engine, config.placement, config.rollout.sampling.max_tokens) == ("vllm", "colocated", 512)


def test_what_the_algorithm_has_no_key_for_is_told(tmp_path: Path) -> None:
    words = ["algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.clip_ratio=0.3", "data.max_prompt_length=$LONG"]
    lost = recipe_of(tmp_path, "run.sh", " ".join([*words, "actor_rollout_ref.actor.entropy_coeff=0"]))
    assert sorted(lost) == ["algorithm.clip_high=0.3", "algorithm.clip_low=0.3", "data.max_prompt_length"]
    assert lost["data.max_prompt_length"] == "its value '$LONG' is none that it can have"
    assert load_config([f"recipe={tmp_path}", "model=tiny", "rollout.dtype=float32"]).algorithm.name == "rloo"


WORDS = st.sampled_from(["grpo", "fsdp", "wandb", "a/b.c", "$VARIABLE"])
VALUES = st.one_of(st.booleans(), st.integers(-1, 9), st.floats(0, 1), WORDS, st.lists(WORDS))


@pytest.mark.parametrize("framework", [VERL, TRL], ids=lambda one: one.name)
def test_no_key_is_passed_over(framework: Framework) -> None:
    known = sorted({key for rule in framework.rules for key in rule.theirs})

    @given(st.dictionaries(st.sampled_from(known + [f"{key}x" for key in framework.without]), VALUES))
    def holds(values: dict[str, object]) -> None:
        values |= {framework.marks[0] + "z": 1}
        _, found = translated(values)
        told = {key for key, _ in [*found.became, *found.lost]}
        assert set(values) <= told

    holds()


@pytest.mark.parametrize("framework", [VERL, TRL], ids=lambda one: one.name)
def test_the_page_has_every_key_and_every_key_of_ours_is_one(framework: Framework) -> None:
    assert table(framework) in PAGE, "docs/coming_from.md: put `rules.table` of the framework there"
    known = {key.name for section in sections() for key in section.keys}
    known |= {f"{name.rpartition('.')[0]}.*" for name in known} | {section.title for section in sections()}
    named = {name for rule in framework.rules for name in re.findall(r"`([^`]+)`", rule.ours)} | {"algorithm.name"}
    named -= {"algorithm.name", "data.columns", "rollout.engine_options.max_num_batched_tokens"}
    assert sorted(named - known) == []


def test_the_command_prints_a_recipe_and_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(VERL_GSM8K)
    assert main(["translate", str(tmp_path / "run.sh"), "--write", str(tmp_path / "recipe.yaml")]) == 0
    told = capsys.readouterr().out
    assert "keys of verl are in" in told
    assert "not translated, 2 keys:" in told
    assert "trainer.total_epochs: steps are counted here" in told
    assert load_config([f"recipe={tmp_path}"]).algorithm.group_size == 5


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("algorithm: {name: grpo}\n")
    with pytest.raises(ConfigError, match="none of the 1 keys is one of verl's"):
        translated(read(str(tmp_path / "own.yaml")))
    with pytest.raises(ConfigError, match="there is no such file"):
        read(str(tmp_path / "none.yaml"))
