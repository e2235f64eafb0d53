"""GPU handles on their way into the processes of a real engine of vLLM."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.engine_calls import StreamedVersion, StreamPart
from penstock.workers.weights.weight_senders import pickle_handles

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its transfer engines are not tested")


def test_handles_reach_the_process_of_a_real_engine(tmp_path: Path) -> None:
    """vLLM's receiver opens them there; on a machine without a GPU that is as far as it gets."""
    build_fresh_model(tmp_path, FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2), 0)
    config = RolloutConfig(max_model_len=32, kv_cache_gib=0.1, max_concurrent_samples=16)
    handle = {"GPU-0": (torch.Tensor, (2,), torch.bfloat16, b"handle")}
    info = {
        "names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "tensor_sizes": [2], "ipc_handles": handle
    }  # fmt: skip

    async def run() -> list[Any]:
        engine = VllmEngine(EngineSpec(config, str(tmp_path), transport="ipc"))
        await engine.start()
        try:
            await engine.connect({"packed": True})
            part = StreamPart(1, pickle_handles(info))
            return await asyncio.gather(
                engine.load(StreamedVersion(1, 1)), engine.deliver(part), return_exceptions=True
            )
        finally:
            await engine.close()

    loaded, delivered = asyncio.run(run())
    assert isinstance(loaded, WeightError)
    assert "phase load" in str(loaded)
    assert "CUDA" in str(loaded) or "UUID" in str(loaded)  # no GPU here, or another one than the handle's
    assert delivered is loaded
