"""Tokens as text, from whatever tokenizer a run left."""

from pathlib import Path

from penstock.conf.model import FreshModelConfig
from penstock.ui.answers import TokenTexts
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.models.tokenizer import load_tokenizer

SMALL = FreshModelConfig(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)


def test_tokens_are_those_of_the_runs_own_tokenizer(tmp_path: Path) -> None:
    build_fresh_model(tmp_path / "model", SMALL, seed=0)
    ids = load_tokenizer(str(tmp_path / "model"))("12 + é")["input_ids"]
    texts = TokenTexts(tmp_path, {}).of(ids)
    assert len(texts) == len(ids)
    assert "".join(texts[:5]) == "12 + "
    assert TokenTexts(tmp_path / "elsewhere", {"model": {"path": str(tmp_path / "model")}}).of(ids) == texts


def test_without_one_tokens_are_numbers(tmp_path: Path) -> None:
    assert TokenTexts(tmp_path, {}).of([5, 7]) == ["[5]", "[7]"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{half")
    assert TokenTexts(tmp_path, {"model": {"path": None}}).of([5]) == ["[5]"]
