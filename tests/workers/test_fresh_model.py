"""A model made from nothing is a real HF directory, and its tokenizer loses nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.conf.errors import ModelError
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import EOS_ID, build_fresh_model
from penstock.workers.pictures.processor import auto_class

SMALL = FreshModelConfig(num_layers=1, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fresh")
    build_fresh_model(path, SMALL, seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path):
    return AutoTokenizer.from_pretrained(directory)


def configuration(directory: Path) -> Any:
    """The file without dtypes, which a model that was loaded has in each part of it."""
    text = (directory / "config.json").read_text()
    return json.loads(text, object_hook=lambda part: {key: value for key, value in part.items() if key != "dtype"})


@pytest.mark.parametrize("more", [{}, {"num_experts": 4}, {"num_vision_layers": 1}], ids=["text", "experts", "seeing"])
def test_files_are_those_that_save_pretrained_writes(more, tmp_path: Path) -> None:
    config = replace(SMALL, hidden_size=64, **more)
    build_fresh_model(tmp_path / "made", config, seed=1)
    model = auto_class(AutoConfig.from_pretrained(tmp_path / "made")).from_pretrained(tmp_path / "made")
    model.save_pretrained(tmp_path / "saved")
    for file in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / "made" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()
    made, saved = (configuration(tmp_path / name) for name in ("made", "saved"))
    assert made == saved


def test_text_goes_in_and_out_unchanged(tokenizer) -> None:
    printable = st.text(alphabet="\n" + "".join(map(chr, range(32, 127))), max_size=40)

    @given(printable)
    def check(text: str) -> None:
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text

    check()


def test_every_id_of_the_model_is_a_token(directory: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert len(tokenizer) == model.config.vocab_size == 99
    assert len({tokenizer.decode([token]) for token in range(3, 99)}) == 96


def test_the_chat_template_is_the_text_and_a_newline(tokenizer) -> None:
    prompt = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) == "1+2=\n"
    whole = [*prompt, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == "1+2=\n3<eos>"
    assert tokenizer("3<eos>").input_ids[-1] == EOS_ID


def test_embeddings_are_tied_and_the_end_of_sequence_is_known(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.generation_config.eos_token_id == EOS_ID
    assert next(model.parameters()).dtype == torch.float32


def test_the_same_seed_makes_the_same_weights(directory: Path, tmp_path: Path) -> None:
    build_fresh_model(tmp_path / "same", SMALL, seed=1)
    build_fresh_model(tmp_path / "other", SMALL, seed=2)
    weights = (directory / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_making_a_model_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build_fresh_model(tmp_path, SMALL, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 30), ("num_kv_heads", 3)])
def test_sizes_that_do_not_fit_name_their_key(tmp_path: Path, key: str, value: int) -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 1}
    config = FreshModelConfig(**(sizes | {key: value}))
    with pytest.raises(ModelError, match=f"model.fresh.{key}"):
        build_fresh_model(tmp_path, config, seed=0)
