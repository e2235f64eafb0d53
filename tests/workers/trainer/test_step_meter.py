"""A rank's measurements of a step, against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from penstock.metering.meters import Meters
from penstock.workers.trainer.step_meter import ModelSize, StepMeter, clock, peak_flops, size_of
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from tests.metering.measured import measured


class Rows:
    """Two rows: 3 tokens of a prompt and 1 or 5 of a response."""

    names = ("prompt_ids", "response_ids")

    def __len__(self) -> int:
        return 2

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def lengths(self, name: str) -> np.ndarray:
        return np.array([3, 3] if name == "prompt_ids" else [1, 5])


def report(*, speaks: bool = True) -> StepReport:
    tokens_N = np.array([1, 5] if speaks else [], np.int64)
    nothing = np.zeros(len(tokens_N))
    rows = TrainedRows(nothing, tokens_N, tokens_N, nothing, tokens_N, nothing, tokens_N)
    seconds = {"plan": 0.25, "forward": 0.5, "backward": 1.0, "optimizer": 0.25, "update": 2.0, "keep": 0.5}
    return StepReport(1, 0, {}, rows, 4.0, 3.0, seconds, np.arange(len(tokens_N)))


def test_a_step_is_counted_and_its_parts_are_measured() -> None:
    meters = Meters()
    meter = StepMeter(meters, ModelSize(1000, 2, 10), num_peers=2)
    meter.begin()
    meter.note(report(), Rows())  # type: ignore[arg-type]
    found = measured(meters)
    assert [found[f"trainer_{what}_total"] for what in ("steps", "samples", "tokens")] == [1, 2, 6]
    phases = {words.split()[1]: value for words, value in found.items() if "phase" in words}
    assert phases == {"wait": 4.0, "forward": 0.5, "backward": 1.0, "optimizer": 0.25, "other": 1.25}
    # Sequences of 4 and 8 tokens, 6 x 1000 a token, 12 x 2 x 10 a pair of tokens; two ranks, two seconds.
    assert found["trainer_flops_per_second"] == (6000 * 12 + 240 * (16 + 64)) / 2 / 2.0
    assert found["trainer_peak_memory_bytes"] > 1e6
    assert "trainer_mfu_ratio" not in found


def test_of_a_mixtures_experts_those_count_that_a_token_is_sent_to() -> None:
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 10,
    }
    config = Qwen2MoeConfig(
        **sizes, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=3, shared_expert_intermediate_size=5
    )
    size = size_of(AutoModelForCausalLM.from_config(config), has_adapters=False)
    attention = 8 * 8 + 8 + 2 * (8 * 4 + 4) + 8 * 8
    of_layer = (
        attention + 6 * 8 + 2 * 3 * 3 * 8 + 3 * 5 * 8 + 8 + 2 * 8
    )  # router, 2 experts, shared one, its gate, norms
    assert size.num_parameters == 2 * 10 * 8 + of_layer + 8
    assert size.update_flops([1]) == 6 * size.num_parameters + 12 * 8


def test_time_is_read_once_a_device_has_done_what_was_launched_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    before, after = clock(torch.device("cpu")), clock(torch.device("cuda", 1))
    assert before < after
    assert waited == [torch.device("cuda", 1)]


def test_a_rank_that_does_not_speak_for_its_rows_counts_steps_alone() -> None:
    meters = Meters()
    StepMeter(meters).note(report(speaks=False), Rows())  # type: ignore[arg-type]
    found = measured(meters)
    assert [found[f"trainer_{what}_total"] for what in ("steps", "samples", "tokens")] == [1, 0, 0]
    assert "trainer_flops_per_second" not in found


@given(st.lists(st.integers(1, 1000), max_size=5), st.lists(st.integers(1, 1000), max_size=5))
def test_operations_add_up_over_sequences(some: list[int], others: list[int]) -> None:
    size = ModelSize(12_345, 3, 64)
    assert size.update_flops(some + others) == size.update_flops(some) + size.update_flops(others)
    adapted = ModelSize(12_345, 3, 64, has_adapters=True)
    assert adapted.update_flops(some) <= size.update_flops(some)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_known_by_the_devices_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_a_model_is_measured_by_its_configuration() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    size = size_of(model, has_adapters=False)
    assert (size.num_layers, size.width) == (3, 32)
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
