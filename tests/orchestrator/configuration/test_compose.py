"""Recipes and words of the command line become one configuration, or one sentence about what is wrong with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.conf.algorithms import GrpoConfig, SftConfig
from penstock.conf.data import DataConfig
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.run_directory.run_directory import to_yaml
from penstock.workers.user_code import packaged_recipes

ALGORITHM = """
from dataclasses import dataclass
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import AlgorithmConfig

@dataclass
class MineConfig(AlgorithmConfig):
    name: str = "mine"
    group_size: int = 4
    sharpness: float = 2.0

def mine(cfg: MineConfig) -> Dataflow:
    return Dataflow()
"""


def write_recipe(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.yaml").write_text(text)
    return directory


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    return str(caught.value)


def test_no_words_give_the_defaults() -> None:
    config = load_config([])
    assert config.trainer == RunConfig().trainer
    assert isinstance(config.algorithm, GrpoConfig)


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_every_recipe_of_the_package_composes(name: str) -> None:
    config = load_config([f"recipe={name}"])
    assert config.recipe == name
    assert config.description


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine", "trainer: {max_steps: 7, groups_per_step: 3}\nseed: 5\n")
    config = load_config([f"recipe={recipe}", "trainer.max_steps=9"])
    assert (config.trainer.max_steps, config.trainer.groups_per_step, config.seed) == (9, 3, 5)
    assert config.trainer.num_ranks == RunConfig().trainer.num_ranks


def test_dotted_keys_in_a_recipe_are_the_nested_ones(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "trainer.max_steps: 7\ntrainer:\n  groups_per_step: 3\n")
    config = load_config([f"recipe={recipe}"])
    assert (config.trainer.max_steps, config.trainer.groups_per_step) == (7, 3)


def test_a_recipes_preset_yields_to_its_keys_and_the_command_lines_does_not(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "model: tiny\nrollout: {max_model_len: 64, sampling: {max_tokens: 8}}\n")
    assert load_config([f"recipe={recipe}"]).rollout.max_model_len == 64
    assert load_config([f"recipe={recipe}", "model=tiny"]).rollout.max_model_len == 2048
    assert load_config([f"recipe={recipe}", "model=tiny", "rollout.max_model_len=32"]).rollout.max_model_len == 32


def test_a_recipe_for_gpus_runs_on_a_cpu_with_the_tiny_model() -> None:
    on_gpus, on_cpu = load_config(["recipe=gsm8k"]), load_config(["recipe=gsm8k", "model=tiny"])
    assert (on_gpus.model.path, on_gpus.rollout.num_gpus_per_worker) == ("Qwen/Qwen2.5-1.5B-Instruct", 1)
    assert (on_cpu.model.path, on_cpu.rollout.num_gpus_per_worker, on_cpu.trainer.num_gpus_per_rank) == (None, 0, 0)
    assert on_cpu.trainer.dtype == on_cpu.rollout.dtype == "float32"


def test_a_model_of_ones_own_stays_with_the_settings_for_a_cpu(tmp_path: Path) -> None:
    config = load_config(["recipe=gsm8k", "model=tiny", f"model.path={tmp_path}"])
    assert config.model.path == str(tmp_path)
    assert config.rollout.num_gpus_per_worker == config.trainer.num_gpus_per_rank == 0


def test_the_command_lines_algorithm_replaces_the_recipes_and_keeps_shared_keys() -> None:
    config = load_config(["recipe=arithmetic", "algorithm=sft"])
    assert isinstance(config.algorithm, SftConfig)
    assert config.algorithm.group_size == load_config(["recipe=arithmetic"]).algorithm.group_size


def test_options_of_the_recipes_function_are_left_with_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine", "reward: {function: reasoning_gym, options: {strict: true}}\n")
    of = lambda *words: load_config([f"recipe={recipe}", *words]).reward.options  # noqa: E731
    assert of() == of("reward.function=reasoning_gym") == {"strict": True}
    assert of("reward.function=digits") == {}
    assert of("reward.options.scale=2", "reward.function=digits") == {"scale": 2}


def test_a_configuration_of_python_is_resolved_as_a_loaded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise ValueError('it was imported')")
    (tmp_path / "rows.jsonl").write_text("")
    config = RunConfig(data=DataConfig(path="rows.jsonl", source="jsonl"), algorithm=SftConfig())
    assert resolve(config).config.data.path == str(tmp_path / "rows.jsonl")
    assert config.data.path == "rows.jsonl"
    with pytest.raises(ConfigError, match="it was imported"):
        resolve(RunConfig(imports=["mine.py"]))
    with pytest.raises(ConfigError, match="max_staleness"):
        resolve(RunConfig(placement="colocated", max_staleness=1))
    with pytest.raises(ConfigError, match="no algorithm is named"):
        resolve(RunConfig())


def test_an_algorithm_of_ones_own_is_named_by_file_and_function(tmp_path: Path) -> None:
    (tmp_path / "algo.py").write_text(ALGORITHM)
    config = load_config([f"algorithm={tmp_path}/algo.py:mine", "algorithm.sharpness=3"])
    assert (config.algorithm.name, config.algorithm.group_size) == ("mine", 4)
    assert config.algorithm.sharpness == 3.0  # type: ignore[attr-defined]
    assert config.imports == [str(tmp_path / "algo.py")]


def test_a_recipe_brings_its_own_algorithm_by_imports(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "imports: [algo.py]\nalgorithm: {name: brought, sharpness: 5}\n")
    text = ALGORITHM.replace("def mine", '@algorithm("brought")\ndef mine')
    (tmp_path / "algo.py").write_text(text)
    config = load_config([f"recipe={recipe}"])
    assert (config.algorithm.name, config.algorithm.sharpness) == ("brought", 5.0)  # type: ignore[attr-defined]


@pytest.mark.real
def test_functions_of_imported_files_travel_by_value(tmp_path: Path) -> None:
    (tmp_path / "travels.py").write_text("def double(x):\n    return 2 * x\n")
    load_config([f"imports=[{tmp_path}/travels.py]"])
    from ray import cloudpickle

    module = next(module for name, module in sys.modules.items() if name.startswith("penstock_") and "travels" in name)
    pickled = cloudpickle.dumps(module.double)
    script = f"import pickle; print(pickle.loads({pickled!r})(21))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        == "42"
    )


def test_values_that_are_no_literals_are_text() -> None:
    config = load_config(["data.prompt_template=Solve: {prompt}, please", "name=first try"])
    assert config.data.prompt_template == "Solve: {prompt}, please"
    assert config.name == "first try"


def test_lists_may_hold_overrides_as_they_are_typed() -> None:
    config = load_config(["warm_start.overrides=[trainer.max_steps=300, name=first try]"])
    assert config.warm_start.overrides == ["trainer.max_steps=300", "name=first try"]


def test_free_dictionaries_take_new_keys() -> None:
    config = load_config(["data.options.max_digits=3", "reward.options={scale: 2}", "tracking.tags.team=blue"])
    assert config.data.options == {"max_digits": 3}
    assert config.reward.options == {"scale": 2}
    assert config.tracking.tags == {"team": "blue"}


def test_labels_of_nodes_may_have_dots_in_them(tmp_path: Path) -> None:
    text = "cluster.labels.rollout: {ray.io/accelerator-type: A100}\ncluster: {labels: {reward: {a.b/c: d}}}\n"
    recipe = write_recipe(tmp_path / "mine", text)
    words = [f"recipe={recipe}", "cluster.labels.trainer={ray.io/accelerator-type: H100, zone: 1}"]
    assert load_config(words).cluster.labels == {
        "rollout": {"ray.io/accelerator-type": "A100"},
        "reward": {"a.b/c": "d"},
        "trainer": {"ray.io/accelerator-type": "H100", "zone": "1"},
    }


def test_existing_paths_become_absolute_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    words = ["data.path=train.jsonl", "model.path=model", "model.reference_path=Qwen/Qwen2.5-0.5B"]
    config = load_config([*words, "model.paths={teacher: model, judge: Qwen/Qwen2.5-0.5B}"])
    assert config.data.path == str(tmp_path / "train.jsonl")
    assert config.model.path == str(tmp_path / "model")
    assert config.model.reference_path == "Qwen/Qwen2.5-0.5B"
    assert config.model.paths == {"teacher": str(tmp_path / "model"), "judge": "Qwen/Qwen2.5-0.5B"}


def test_paths_in_a_recipe_may_be_relative_to_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine", "data: {path: rows.jsonl}\nreward: {function: 'score.py:score'}\n")
    (recipe / "rows.jsonl").write_text("{}\n")
    (recipe / "score.py").write_text("")
    config = load_config([f"recipe={recipe}"])
    assert config.data.path == str(recipe / "rows.jsonl")
    assert config.reward.function == f"{recipe / 'score.py'}:score"


def test_a_file_for_a_recipe_that_reads_the_hub_switches_the_source() -> None:
    config = load_config(["recipe=gsm8k", "data.path=rows.jsonl"])
    assert (config.data.source, config.data.subset, config.evaluation.every_steps) == ("auto", None, 0)


def test_the_yaml_of_a_configuration_composes_to_the_same_again(tmp_path: Path) -> None:
    config = load_config(["recipe=arithmetic", "seed=3"])
    again = load_config([f"recipe={write_recipe(tmp_path, to_yaml(config))}"])
    again.recipe = config.recipe
    assert again == config


def test_a_file_as_a_recipe_is_told_how_to_become_a_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: arithmetic\n")
    message = refusal(f"recipe={tmp_path}/mine.yaml")
    assert f"`mkdir mine && mv {tmp_path}/mine.yaml mine/recipe.yaml`, then recipe=mine." in message


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("trainer.max_step=3", ["trainer.max_step", "did you mean trainer.max_steps?"]),
        ("max_steps=3", ["did you mean trainer.max_steps?"]),
        ("trainer.max_steps=abc", ["trainer.max_steps=abc", "expected int", "got str"]),
        ("trainer.max_steps=2.5", ["expected int", "got float"]),
        ("trainer.max_steps=0", ["trainer.max_steps=0", "at least 1"]),
        ("cluster.num_gpus=many", ["cluster.num_gpus=many", "int | null"]),
        ("trainer.optimizer.betas=0.9", ["list[float]", "trainer.optimizer.betas=[a,b]"]),
        ("trainer=3", ["section", "max_steps"]),
        ("rollout.engine=vlm", ["rollout.engine=vlm", "'vllm'"]),
        ("algorithm=grop", ["algorithm=grop", "'grpo'"]),
        ("algorithm.kl_coeff=1", ["did you mean algorithm.kl_coef?"]),
        ("model=tinny", ["model=tinny", "'tiny'", "model.path=tinny"]),
        ("recipe=arithmetik", ["recipe=arithmetik", "'arithmetic'"]),
        ("algorithm=nowhere.py:f", ["algorithm=", "nowhere.py", "no file"]),
        ("imports=[nowhere.py]", ["imports", "nowhere.py"]),
        ("evaluation.seed=0", ["evaluation.seed=0", "data.seed"]),
        ("name=${nope}", ["name", "nope"]),
        ("arithmetic", ["'arithmetic' is not key=value"]),
        ("learning_rate=1e-5", ["learning_rate: unknown key. TRL's learning_rate is trainer.optimizer.lr here."]),
        ("num_generations=8", ["TRL's num_generations is ", "algorithm.group_size"]),
        ("actor_rollout_ref.rollout.n=5", ["verl's actor_rollout_ref.rollout.n is algorithm.group_size here."]),
        ("data.train_batch_size=8", ["verl's data.train_batch_size is trainer.groups_per_step"]),
        ("actor_rollout_ref.rollout.calm=1", ["It is a key of verl's", "`penstock translate FILE`"]),
        ("~seed", ["not key=value"]),
        ("nonsense.key=1", ["nonsense", "Sections"]),
    ],
)
def test_what_cannot_work_is_told_with_key_value_and_remedy(word: str, parts: list[str]) -> None:
    words = [word] if word.startswith("recipe=") else ["data.source=reasoning_gym", word]
    message = refusal(*words)
    assert "Traceback" not in message
    assert "hydra" not in message.lower()
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer: {max_step: 3}", ["recipe.yaml: trainer.max_step", "trainer.max_steps"]),
        ("trainer: {max_steps: many}", ["recipe.yaml: trainer.max_steps=many", "expected int"]),
        ("trainer: 3", ["recipe.yaml: trainer=3", "section"]),
        ("trainer: [", ["recipe.yaml line", "not valid YAML"]),
        ("- a\n- b", ["recipe.yaml", "key: value"]),
        ("algorithm: {name: grop}", ["algorithm=grop", "'grpo'"]),
        ("imports: [gone.py]", ["imports", "gone.py"]),
        ("trainer: {max_steps: -1}", ["trainer.max_steps=-1", "at least 1"]),
    ],
)
def test_a_faulty_recipe_is_told_with_its_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(f"recipe={write_recipe(tmp_path, text)}")
    for part in parts:
        assert part in message


def test_an_import_that_raises_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    message = refusal(f"imports=[{tmp_path}/broken.py]")
    assert "broken.py" in message
    assert "nothing_of_that_name" in message


@pytest.mark.real
def test_a_wrong_key_is_told_without_importing_torch_or_ray() -> None:
    script = (
        "import sys\nfrom penstock.cli.main import main\n"
        "code = main(['run', 'recipe=arithmetic', 'trainer.max_step=3'])\n"
        "print(code, 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == ["2", "False", "False"]
