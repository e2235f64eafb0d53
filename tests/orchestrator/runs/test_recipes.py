"""Every recipe that comes with Penstock runs: two steps each, from a model of random weights, with the small engine."""

import shutil
from dataclasses import replace

import pytest
from transformers import AutoModelForSequenceClassification

from penstock.conf.errors import ConfigError
from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.recipes import find_recipe
from penstock.orchestrator.run import run
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.user_code import packaged_recipes
from tests.run_files import events_of, metrics_of

MODEL = FreshModelConfig(
    num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=2, words=["Calculate ", " + "]
)
ELSEWHERE = {"arithmetic", "arithmetic_sft", "gsm8k", "geo3k", "custom_algorithm", "moe_30b"}
"""Seen running by tests of their own; `moe_30b`, which is gsm8k with another model, is planned by one."""
WITHOUT_ENGINES = {
    "code_sft", "count_shapes_sft", "dpo", "guess_sft", "kto", "parallel_answers_sft", "proposer_sft", "repair_sft",
    "reward_model", "see_and_move_sft", "self_distill_sft", "sft", "tictactoe_sft", "tool_use_sft", "tree_sft",
}  # fmt: skip
"""They train on rows of a file."""
SMALL = [
    "rollout.engine=hf", "trainer.max_steps=2", "trainer.groups_per_step=4", "evaluation.every_steps=0",
    "trainer.num_threads=1", "rollout.num_threads=1", "tracking.samples_every_steps=1", "data.size=400",
]  # fmt: skip
FEWER = dict.fromkeys(
    (
        "agent", "guess", "parallel_answers", "proposer", "repair", "see_and_move", "tictactoe", "tictactoe_two",
        "tool_use", "tree",
    ),
    ("algorithm.group_size=4",),
)  # fmt: skip
"""Attempts of several turns each."""
POLICIES = {"proposer": ("proposer", "solver"), "tictactoe_two": ("first", "second")}
KINDS = {"moe": "mixture"} | dict.fromkeys(
    ("count_shapes", "count_shapes_sft", "see_and_move", "see_and_move_sft"), "seeing"
)
"""Models of recipes that want another one than of text."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fresh")
    build_fresh_model(directory / "model", MODEL, seed=0)
    shutil.copytree(directory / "model", directory / "scorer")
    with_head = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1)
    with_head.save_pretrained(directory / "scorer")
    build_fresh_model(directory / "mixture", replace(MODEL, num_experts=4), seed=0)
    build_fresh_model(directory / "seeing", replace(MODEL, num_vision_layers=1), seed=0)
    return directory


def small_config(recipe, models, tmp_path):
    model = models / KINDS.get(recipe, "model")
    words = [f"recipe={recipe}", f"model.path={model}", f"output_dir={tmp_path}", f"name={recipe}", *SMALL]
    words += [f"model.paths.teacher={model}", f"model.paths.reward_model={models / 'scorer'}"]
    # From random weights every answer is wrong and every group agrees: nothing but length tells samples apart.
    return load_config([*words, *FEWER.get(recipe, ()), "reward.function=digits", "reward.options={}"])


@pytest.mark.real
@pytest.mark.parametrize("recipe", sorted(packaged_recipes().keys() - ELSEWHERE))
def test_a_recipe_trains(recipe, models, tmp_path, cluster):
    config = small_config(recipe, models, tmp_path)
    config.rollout.router_replay = recipe == "moe"
    result = run(config, quiet=True)
    steps = metrics_of(result.directory)
    assert [line["step"] for line in steps] == [1, 2]
    names = POLICIES.get(recipe, ("actor",))
    losses = [steps[-1].get(f"{name}/{loss}") for name in names for loss in ("pg_loss", "loss")]
    assert any(loss is not None and abs(loss) < 1e3 for loss in losses)
    assert steps[-1][f"{names[0]}/grad_norm"] >= 0
    if recipe == "moe":
        assert 1 <= steps[0]["actor/router_balance"] <= 2
        assert max(step["mismatch/logprob_abs_mean"] for step in steps) < 1e-6  # with the engine's experts
    if recipe == "ppo":
        assert steps[0]["critic/value_loss"] > 0
        assert {"critic/lr", "actor/kl"} & steps[0].keys()
    if recipe == "reward_model":
        scorer = AutoModelForSequenceClassification.from_pretrained(result.model)
        assert scorer.config.num_labels == 1


@pytest.mark.soak
@pytest.mark.real
@pytest.mark.parametrize("recipe", sorted(packaged_recipes().keys() - ELSEWHERE - WITHOUT_ENGINES))
def test_probes_find_no_fault_in_an_asynchronous_run_of_vllm(recipe, models, tmp_path, cluster):
    config = small_config(recipe, models, tmp_path)
    config.max_staleness, config.trainer.max_steps, config.rollout.engine = 2, 14, "vllm"
    result = run(config, quiet=True)
    looks = [key for line in metrics_of(result.directory) for key in line if key.startswith("probe/s")]
    assert len(looks) >= 4 or config.rollout.max_pictures  # rows with pictures are not scored again
    assert "mismatch" not in [event.get("rule") for event in events_of(result.directory)]


def test_a_recipe_on_a_base_says_only_what_differs():
    base, gspo = find_recipe("grpo"), find_recipe("gspo")
    assert gspo.values["data"] == base.values["data"]
    assert gspo.values["trainer"] == base.values["trainer"] | {"num_minibatches": "2"}
    assert gspo.values["algorithm"] == {"name": "gspo", "group_size": "8"}


def test_a_base_that_is_missing_or_circular_is_refused(tmp_path):
    for name, base in (("a", "b"), ("b", "a"), ("c", "grpoo")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(f"base: ../{base}\n" if base != "grpoo" else "base: grpoo\n")
    with pytest.raises(ConfigError, match="leads back to this recipe"):
        find_recipe(str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="base=grpoo is no recipe; did you mean 'grpo'"):
        find_recipe(str(tmp_path / "c"))


@pytest.mark.parametrize("recipe", sorted(packaged_recipes()))
def test_a_recipe_has_a_readme_that_says_how_to_run_it(recipe):
    text = (packaged_recipes()[recipe] / "README.md").read_text()
    assert f"penstock run recipe={recipe}" in text
    assert find_recipe(recipe).description
