"""The directory has what recipes look for, by the cookbook's own loaders, in the environment that recipes run in."""

from pathlib import Path

import pytest

from tests.serve.cookbook.directory import BASE, CHAT, make_directory
from tests.serve.cookbook.recipes import RECIPES
from tests.serve.cookbook.running import RecipeFailed, run_module

NOWHERE = "http://127.0.0.1:9"
"""An address at which nobody listens."""
LOOKS = """
import asyncio
from tinker_cookbook import renderers
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig as Common
from tinker_cookbook.tokenizer_utils import get_tokenizer

base, chat = {base!r}, {chat!r}
plain = renderers.get_renderer("role_colon", get_tokenizer(base))
marked = renderers.get_renderer("qwen3_disable_thinking", get_tokenizer(chat))
asked = [{{"role": "user", "content": "What is 1 + 2?"}}]
assert plain.tokenizer.decode(plain.build_generation_prompt(asked).to_ints()).endswith("Assistant:")
assert marked.build_generation_prompt(asked).length < 60, "a mark is one token"

from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
gsm8k = Gsm8kDatasetBuilder(batch_size=8, group_size=4, renderer_name="role_colon", model_name_for_tokenizer=base)
train, test = asyncio.run(gsm8k())
assert (len(train), len(test)) == (4, 1)
env = asyncio.run(train.get_batch(0)[0].make_envs())[0]
assert env.check_answer("\\\\boxed{{" + env.answer + "}}"), env.answer

from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
common = Common(model_name_for_tokenizer=base, renderer_name="role_colon", max_length=256, batch_size=16)
assert len(NoRobotsBuilder(common_config=common)()[0].get_batch(0)) == 16

from tinker_cookbook.recipes.preference.datasets import HHHComparisonBuilder
train, test = HHHComparisonBuilder().get_train_and_test_datasets()
assert all(HHHComparisonBuilder().example_to_labeled_comparison(row) for row in train)

from tinker_cookbook.recipes.sdft.datasets import load_sciknoweval
assert len(load_sciknoweval()[0]) == 36

from tinker_cookbook.recipes.rl_numerics_check.env import CountingTaskConfig, load_wikitext_corpus, sample_problem
import random
small = CountingTaskConfig(num_pages_min=1, num_pages_max=2, page_chars=200)
assert sample_problem(random.Random(0), load_wikitext_corpus(), small).pages
print("all there")
"""
READS = """
import importlib
import chz

for name, words in {commands!r}.items():
    module = importlib.import_module(f"tinker_cookbook.recipes.{{name}}")
    if hasattr(module, "build_config_blueprint"):
        model = words[0].removeprefix("model_name=")
        blueprint = module.build_config_blueprint(model)
    else:
        blueprint = chz.Blueprint(getattr(module, "CLIConfig", None) or module.Config)
    blueprint.make_from_argv(words)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("cookbook"))


@pytest.mark.real
def test_the_cookbooks_loaders_find_all_of_it_without_a_network(directory: Path) -> None:
    assert "all there" in run_module(["-c", LOOKS.format(base=BASE, chat=CHAT)], NOWHERE, directory)


def test_the_same_seed_makes_the_same_rows(directory: Path, tmp_path: Path) -> None:
    make_directory(tmp_path, model=lambda folder: folder.mkdir(parents=True))
    for name in ("openai/gsm8k/main/train.jsonl", "conversations.jsonl"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


@pytest.mark.real
def test_every_recipe_is_there_and_knows_its_arguments(directory: Path) -> None:
    commands = {recipe.module: recipe.command("logs/none")[2:] for recipe in RECIPES.values()}
    run_module(["-c", READS.format(commands=commands)], NOWHERE, directory)


@pytest.mark.real
def test_a_recipe_that_fails_is_told_with_its_last_lines(directory: Path) -> None:
    with pytest.raises(RecipeFailed, match="no such thing"):
        run_module(["-c", "raise ValueError('no such thing')"], NOWHERE, directory)
    with pytest.raises(RecipeFailed, match="not ended after 1 s"):
        run_module(["-c", "import time; time.sleep(60)"], NOWHERE, directory, timeout_s=1)
