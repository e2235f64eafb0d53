"""Configurations of verl and TRL become recipes that load; no key is passed over, and the page tells of all of them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.catalogue import dataflow_of
from penstock.cli.main import main
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import needed, plan_actors
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.counterparts import Framework, frameworks, table
from penstock.orchestrator.configuration.keys import sections
from penstock.orchestrator.configuration.translate import as_yaml, read, translated

VERL, TRL = frameworks()
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


VERL_DAPO = """#!/usr/bin/env bash
set -xeuo pipefail
# ---- what a user may set ----
NGPUS=${NGPUS:-8}
NNODES=${NNODES:-1}
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen3-8B-Base"}
exp_name="dapo-${MODEL_PATH##*/}-$(date +%m%d)"
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
TP=${TP:-4}
DATA=(
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.val_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
    data.train_batch_size=512
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}  # a comment
    data.truncation='left'
)
ACTOR=(
    actor_rollout_ref.model.path=$MODEL_PATH
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2))
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.entropy_coeff=0
)
ACTOR+=(+actor_rollout_ref.actor.loss_agg_mode=token-mean)

python3 examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer' \\
    algorithm.adv_estimator=grpo "${DATA[@]}" "${ACTOR[@]}" \\
    actor_rollout_ref.rollout.name=${ENGINE:-vllm} \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP} \\
    trainer.logger='["console","wandb"]' trainer.experiment_name="${exp_name}" \\
    trainer.n_gpus_per_node=$NGPUS trainer.nnodes=$NNODES trainer.default_local_dir=${CKPTS} \\
    trainer.total_training_steps=100 "$@" 2>&1 | tee log.txt
"""
TRL_LAUNCH = """# pip install trl
accelerate launch \\
    --config_file=examples/accelerate_configs/deepspeed_zero3.yaml --num_processes 4 \\
    examples/scripts/grpo_agent.py \\
    --model_name_or_path Qwen/Qwen3-1.7B --dataset_name trl-lib/DeepMath-103K \\
    --learning_rate 1e-5 --beta 0.001 --gradient_checkpointing --dtype bfloat16 \\
    --use_vllm --vllm_mode colocate --max_completion_length 1024 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" \\
    --reward_funcs accuracy_reward think_format_reward my_lib.rewards.brief \\
    --num_generations 8 --per-device-train-batch-size 8 --report_to wandb tensorboard
"""


def gpus_of(config: RunConfig) -> float:
    return needed(plan_actors(dataflow_of(config), config))[1]


def test_a_script_of_verls_as_people_write_them_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("NNODES", "2")
    lost = recipe_of(tmp_path, "run.sh", VERL_DAPO)
    assert "$" not in (tmp_path / "recipe.yaml").read_text()
    assert lost["trainer.default_local_dir"] == "its value '${CKPTS}' is known only when the script runs"
    assert "known only when the script runs" in lost["trainer.experiment_name"]
    config = load_config([f"recipe={tmp_path}"])
    assert {name: part.path for name, part in config.data.mixture.items()} == {
        "gsm8k": "/home/me/data/gsm8k/train.parquet", "math": "/home/me/data/math/train.parquet"
    }  # fmt: skip
    assert (config.evaluation.path, [*config.evaluation.sets]) == ("/home/me/data/gsm8k/test.parquet", ["math"])
    assert (config.data.max_prompt_tokens, config.rollout.sampling.max_tokens) == (2048, 8192)
    assert config.trainer.max_tokens_per_microbatch == 20480
    assert (config.model.path, config.rollout.engine, config.name) == ("Qwen/Qwen3-8B-Base", "vllm", None)
    assert (config.trainer.num_ranks, config.rollout.num_workers, gpus_of(config)) == (16, 4, 16)


def test_a_launch_of_trls_is_a_recipe(tmp_path: Path) -> None:
    lost = recipe_of(tmp_path, "run.sh", TRL_LAUNCH)
    assert sorted(lost) == []
    config = load_config([f"recipe={tmp_path}"])
    assert config.trainer.lora.target_modules == ["q_proj", "v_proj"]
    assert [one.function for one in config.rewards] == [
        "trl.rewards:accuracy_reward", "trl.rewards:think_format_reward", "my_lib.rewards:brief"
    ]  # fmt: skip
    assert (config.trainer.num_ranks, config.rollout.num_workers, gpus_of(config)) == (4, 4, 4)
    assert (config.trainer.groups_per_step, config.tracking.sinks) == (4, ["ray", "wandb", "tensorboard"])
    assert "max_prompt_tokens" not in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("refers", [False, True])
def test_a_recipe_reserves_no_more_gpus_than_verl_has(tmp_path: Path, devices: int, size: int, refers: bool) -> None:
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=a/b", f"trainer.n_gpus_per_node={devices}"]
    words += [f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"]
    words += [f"actor_rollout_ref.actor.use_kl_loss={refers}"]
    lost = recipe_of(tmp_path, "run.sh", "python3 -m verl.trainer.main_ppo " + " ".join(words))
    config = load_config([f"recipe={tmp_path}"])
    assert ("trainer.n_gpus_per_node" in lost) == (devices % size > 0)
    assert gpus_of(config) == (0 if "trainer.n_gpus_per_node" in lost else devices)


def test_every_key_of_trls_that_is_translated_is_one() -> None:
    from transformers import TrainingArguments
    from trl import GRPOConfig, ModelConfig, ScriptArguments
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOConfig, ModelConfig, ScriptArguments, GRPOScriptArguments, TrainingArguments)
    known = {field.name for kind in kinds for field in fields(kind)}
    earlier = {"max_prompt_length", "warmup_ratio", "torch_dtype"}
    assert {key for rule in TRL.rules for key in rule.theirs} - known == {*earlier, "num_processes"}
    assert GRPOConfig.__dataclass_fields__["max_completion_length"].default == 512


def test_the_command_says_whether_its_recipe_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "grpo.yaml"
    script.write_text("num_generations: 8\nmodel_name_or_path: a/b\nper_device_train_batch_size: 16\n")
    assert main(["translate", str(script), "num_processes=2"]) == 2
    told = capsys.readouterr().out
    assert "not said there, and taken: algorithm.name=grpo, reward.function=math_verify" in told
    assert "the recipe does not start yet: data.path: the recipe names no data." in told
    assert "num_processes:" not in told
    assert main(["translate", str(script), "num_processes=2", "dataset_name=c/d"]) == 0
    told = capsys.readouterr().out
    assert "checked: the recipe's keys fit together, and its" in told
    assert "2 GPU(s)" in told
    assert main(["translate", str(script), "dataset_name=c/d", "top_p=3"]) == 2
    assert "the recipe does not start yet: rollout.sampling.top_p=3.0: must lie between" in capsys.readouterr().out


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
    assert config.data.path == "/data/gsm8k/train.parquet"
    assert config.evaluation.path == "/data/gsm8k/test.parquet"
    assert (config.data.columns.prompt, config.data.columns.answer) == ("prompt", "reward_model.ground_truth")
    assert (config.data.max_prompt_tokens, config.data.too_long) == (512, "skip")
    assert (config.rollout.sampling.max_tokens, config.rollout.max_model_len) == (1024, 1536)
    assert (config.trainer.groups_per_step, config.trainer.num_minibatches) == (1024, 4)
    assert (config.algorithm.name, config.algorithm.group_size) == ("grpo", 5)
    assert (config.algorithm.kl_coef, config.trainer.optimizer.lr) == (0.001, 1e-6)
    assert (config.placement, config.trainer.num_ranks, config.rollout.num_workers) == ("colocated", 8, 4)
    assert gpus_of(config) == 8
    assert (config.rollout.tensor_parallel_size, config.checkpoint.every_steps) == (2, 20)
    assert config.tracking.sinks == ["ray", "wandb"]


@pytest.mark.parametrize(
    ("file", "text"),
    [("run.sh", VERL_GSM8K.replace("main_ppo \\\n", "main_ppo actor_rollout_ref.actor.ppo_epochs=3 \\\n")),
     ("grpo.yaml", TRL_GSM8K + "num_iterations: 3\n")],
)  # fmt: skip
def test_passes_over_a_batch_are_translated(tmp_path: Path, file: str, text: str) -> None:
    recipe_of(tmp_path, file, text)
    assert load_config([f"recipe={tmp_path}"]).algorithm.epochs_per_batch == 3


def test_the_best_model_of_trls_is_a_checkpoint_that_is_kept(tmp_path: Path) -> None:
    more = "load_best_model_at_end: true\nmetric_for_best_model: eval_reward\neval_steps: 10\n"
    lost = recipe_of(tmp_path, "grpo.yaml", TRL_GSM8K + more)
    assert lost["metric_for_best_model"].startswith("eval_reward: set checkpoint.best_metric to a metric of the eval")
    assert load_config([f"recipe={tmp_path}", "evaluation.path=test"]).checkpoint.keep_best == 1


def test_trls_gsm8k_is_a_recipe(tmp_path: Path) -> None:
    lost = recipe_of(tmp_path, "grpo.yaml", TRL_GSM8K)
    assert sorted(lost) == ["no_such_key", "num_processes"]
    assert "not known" in lost["no_such_key"]
    assert "put num_processes=N behind the file" in lost["num_processes"]
    config = load_config([f"recipe={tmp_path}"])
    assert (config.data.path, config.data.subset) == ("openai/gsm8k", "main")
    assert config.data.max_prompt_tokens == 512
    assert config.rollout.truncated == {"length": "mask"}
    assert (config.algorithm.group_size, config.trainer.groups_per_step, config.trainer.num_minibatches) == (8, 8, 1)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (0.2, 0.28, 0.01)
    assert (config.trainer.max_steps, config.trainer.optimizer.warmup_steps) == (200, 20)
    assert (config.rollout.engine, config.placement, config.rollout.sampling.max_tokens) == ("vllm", "colocated", 512)


def test_what_a_file_takes_from_elsewhere_is_told_and_never_written(tmp_path: Path) -> None:
    text = "actor_rollout_ref:\n  model: {path: '${oc.env:MODEL}'}\n  actor: {optim: {lr: 1e-6}}\n"
    lost = recipe_of(tmp_path, "ppo_trainer.yaml", text + "trainer: {project_name: '$(date)', save_freq: 10}\n")
    recipe = (tmp_path / "recipe.yaml").read_text()
    assert "$" not in recipe
    assert sorted(lost) == ["actor_rollout_ref.model.path", "trainer.project_name"]
    assert load_config([f"recipe={tmp_path}"]).trainer.optimizer.lr == 1e-6


def test_a_trl_command_reads_its_config_file_and_its_words_win(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nper_device_train_batch_size: 4\nlearning_rate: 1e-6\n")
    text = "torchrun --nproc_per_node=2 -m trl.scripts.grpo --config grpo.yaml --learning_rate 3e-6 --temperature 0.7"
    assert recipe_of(tmp_path, "run.sh", text) == {}
    config = load_config([f"recipe={tmp_path}"])
    assert (config.algorithm.group_size, config.trainer.groups_per_step, config.trainer.num_ranks) == (4, 2, 2)
    assert (config.trainer.optimizer.lr, config.rollout.sampling.temperature) == (3e-6, 0.7)


def test_what_the_algorithm_has_no_key_for_is_told(tmp_path: Path) -> None:
    words = ["algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.clip_ratio=0.3", "data.max_prompt_length=$LONG"]
    lost = recipe_of(tmp_path, "run.sh", " ".join([*words, "actor_rollout_ref.actor.entropy_coeff=0"]))
    assert sorted(lost) == ["algorithm.clip_high=0.3", "algorithm.clip_low=0.3", "data.max_prompt_length"]
    assert lost["data.max_prompt_length"] == "its value '${LONG}' is known only when the script runs"
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
    assert table(framework) in PAGE, "docs/coming_from.md: put `counterparts.table` of the framework there"
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


@pytest.mark.parametrize(("loss", "name"), [("vanilla", "grpo"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_a_policy_loss_of_verls_is_the_algorithm_of_that_name(tmp_path: Path, loss: str, name: str) -> None:
    words = (
        f"algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode={loss} data.train_files=a.parquet"
    )
    recipe_of(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {words}\n")
    assert load_config([f"recipe={tmp_path}"]).algorithm.name == name


@pytest.mark.parametrize(
    ("said", "aggregation"), [("", "token_mean"), ("loss_agg_mode=seq-mean-token-mean", "sequence_mean")]
)
def test_gspo_averages_over_tokens_as_verls_unless_the_script_says_otherwise(
    tmp_path: Path, said: str, aggregation: str
) -> None:
    actor = "actor_rollout_ref.actor."
    words = f"algorithm.adv_estimator=grpo {actor}policy_loss.loss_mode=gspo {actor * bool(said)}{said}"
    recipe_of(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {words} data.train_files=a.parquet\n")
    assert load_config([f"recipe={tmp_path}"]).algorithm.aggregation == aggregation
