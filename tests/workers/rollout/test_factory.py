"""Engines by name."""

import subprocess
import sys
from typing import cast

import pytest

from penstock.conf.capabilities import ROLLOUT_ENGINES, RolloutCapabilities
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.engine_scripted import ScriptedEngine
from penstock.workers.rollout.rollout_engines import make_engine

LORA = LoraConfig(rank=8, publish="adapter")


def test_the_scripted_engine_is_made_by_name() -> None:
    assert isinstance(make_engine(EngineSpec(RolloutConfig(engine="scripted"), "")), ScriptedEngine)


def test_a_new_engine_is_a_module_and_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "penstock.workers.rollout.engine_scripted:make"
    record = RolloutCapabilities(implementation=module, computes_in_actor=False)
    monkeypatch.setitem(cast(dict[str, RolloutCapabilities], ROLLOUT_ENGINES), "sglang", record)
    config = RolloutConfig(engine="sglang")
    assert not config.capabilities.serves_adapters
    assert isinstance(make_engine(EngineSpec(config)), ScriptedEngine)


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    config = RolloutConfig(engine="hf")
    config.engine = "vlm"
    with pytest.raises(ConfigError, match=r"rollout\.engine=vlm: unknown; did you mean 'vllm'"):
        make_engine(EngineSpec(config, ""))


@pytest.mark.real
@pytest.mark.parametrize(("name", "adapter"), [("vllm", None), ("vllm", LORA), ("scripted", None), ("scripted", LORA)])
def test_making_an_engine_imports_neither_vllm_nor_torch(name: str, adapter: LoraConfig | None) -> None:
    program = (
        "import sys; from penstock.conf.rollout import RolloutConfig; from penstock.conf.trainer import LoraConfig; "
        "from penstock.workers.protocols import EngineSpec; "
        "from penstock.workers.rollout.rollout_engines import make_engine; "
        f"make_engine(EngineSpec(RolloutConfig(engine={name!r}), adapter={adapter!r})); "
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
