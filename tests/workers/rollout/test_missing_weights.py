"""An engine serves no weights that were drawn for what a checkpoint lacks."""

import asyncio
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock.conf.errors import ModelError
from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.rollout_engines import make_engine


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.real)])
def test_an_engine_does_not_start_without_all_weights(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["base_model.model.model.norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    async def scenario() -> None:
        made = make_engine(EngineSpec(RolloutConfig(engine=engine), str(path)))
        try:
            with pytest.raises(
                ModelError, match=r"it lacks 1 of \d+ tensors: model\.norm\.weight\. It has names of PEFT"
            ):
                await made.start()
        finally:
            await made.close()

    asyncio.run(scenario())
