"""`penstock.train` with real actors: functions and rows of the caller's own, within a notebook's event loop."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import penstock
from penstock.workers.user_code import GIVEN

pytestmark = pytest.mark.real

ROWS = [{"question": f"{i} and {i * i} are numbers", "answer": str(i)} for i in range(16)]
FRESH = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
SMALL: dict[str, Any] = {
    "model": {"fresh": FRESH},
    "rollout": {
        "engine": "hf", "num_threads": 1, "max_model_len": 64, "sampling": {"max_tokens": 8}
    },
    "algorithm": {"name": "grpo", "group_size": 4},
    "quiet": True,
}  # fmt: skip


def trainer(max_steps: int) -> dict[str, Any]:
    return {"max_steps": max_steps, "groups_per_step": 2, "num_threads": 1, "optimizer": {"lr": 1e-3}}


@pytest.mark.promise("Quick start")
def test_a_cell_of_a_notebook_trains_with_a_lambda(tmp_path: Path, cluster: str) -> None:
    digits = re.compile(r"\d")

    async def cell() -> penstock.RunResult:
        return penstock.train(
            dataset=ROWS, eval_dataset=ROWS[:4], reward=lambda response: len(digits.findall(response)) / 8,
            trainer=trainer(2), evaluation={"every_steps": 2, "overlap": "allow"}, output_dir=str(tmp_path), **SMALL,
        )  # fmt: skip

    result = asyncio.run(cell())
    assert [line["step"] for line in result.metrics if line["step"]] == [1, 2]
    assert all(0 <= line["reward/mean"] <= 1 for line in result.metrics if line["step"])
    assert "accuracy/heldout" in result.metrics[-1]
    assert (result.model / "model.safetensors").is_file()
    assert "base64," in result._repr_html_()
    texts = [file.read_bytes() for file in result.directory.rglob("*") if file.suffix in (".yaml", ".json", ".jsonl")]
    assert any(GIVEN.encode() in text for text in texts)
    pickled = b"cloudpickle.cloudpickle"  # as in each pickle of a lambda; manifest.json has the package's name
    assert not any(pickled in file.read_bytes() for file in result.directory.rglob("*") if file.is_file())


def test_the_same_call_resumes_the_run_bit_for_bit(tmp_path: Path, cluster: str) -> None:
    def call(name: str, max_steps: int) -> penstock.RunResult:
        return penstock.train(
            dataset=ROWS, reward=[lambda response: len(set(response)) / 8, "digits"], trainer=trainer(max_steps),
            checkpoint={"every_steps": 1}, name=name, output_dir=str(tmp_path), **SMALL,
        )  # fmt: skip

    whole = call("whole", 3)
    call("parts", 1)
    parts = call("parts", 3)
    assert [line["step"] for line in parts.metrics] == [1, 2, 3]
    assert {"reward/lambda", "reward/digits"} <= set(parts.metrics[-1])
    expected, found = (load_file(one.model / "model.safetensors") for one in (whole, parts))
    assert not [name for name in expected if not expected[name].equal(found[name])]
    assert call("parts", 3).seconds == 0
    words = ["recipe=arithmetic", "name=parts", f"output_dir={tmp_path}", "resume=auto"]
    with pytest.raises(penstock.ConfigError, match="Repeat that call in Python"):
        penstock.run(penstock.load_config(words), quiet=True)
