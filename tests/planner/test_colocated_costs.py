"""What a colocated step copies, by hand, as `tests/workers/trainer/on_a_device` counts it."""

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.run_memory import GIB, RunMemory, choose_auto
from penstock.planner.cost_model import Efficiencies, RunDurations, colocated_bytes
from penstock.planner.hardware import KINDS
from tests.orchestrator.configuration.memory.test_rank_memory import shape_of

H100 = KINDS["h100"]
SHAPE = shape_of("QWEN2_7B")
TURNS = (
    "placement=colocated", "rollout.num_workers=8", "rollout.num_gpus_per_worker=0.5", "trainer.num_ranks=8",
    "trainer.num_gpus_per_rank=0.5", "trainer.stay_on_device=false", "faults.keep_state=true",
)  # fmt: skip


def memory_of(*words: str) -> RunMemory:
    config = load_config(["recipe=gsm8k", *TURNS, *words])
    return choose_auto(RunMemory(config, resolve(config).flow, {"policy": SHAPE}, 79 * GIB))


def durations_of(memory: RunMemory) -> RunDurations:
    return RunDurations(memory, H100, H100, 1, 8, Efficiencies(), None)


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ((), 12 + 12),  # the copy that is kept serves while the rank is away, and comes back
        (("trainer.stay_on_device=true",), 12),
        (("faults.keep_state=false",), 12 + 12),  # it leaves and comes back
        (("faults.keep_state=false", "trainer.stay_on_device=true"), 0),
        (
            ("trainer.engine=deepspeed", "trainer.deepspeed.zero_stage=3"),
            12 + 12 + 14,
        ),  # with the shard that is gathered
        (("weights.transport=ipc",), 12 + 12 + 2 * 2 * 8),  # nothing is kept, and engines keep their weights asleep
    ],
)
def test_a_colocated_step_copies_so_many_bytes_of_each_parameter(words: tuple[str, ...], each: int) -> None:
    assert colocated_bytes(memory_of(*words)) == pytest.approx(each * SHAPE.num_parameters / 8, rel=0.01)


def test_two_turns_take_what_a_step_copies_at_the_rate_of_the_bus() -> None:
    memory = memory_of()
    assert 2 * durations_of(memory).turn_s() == pytest.approx(24 * SHAPE.num_parameters / 8 / 50e9, rel=0.01)
    assert durations_of(memory_of("placement=disaggregated")).turn_s() == 0.0


def test_ipc_gains_the_way_through_the_host_less_what_sleeping_engines_keep() -> None:
    stays = durations_of(memory_of("trainer.stay_on_device=true"))
    sync, weights = stays.sync(), 2 * SHAPE.num_parameters
    expected = (
        sync.published_s + sync.paused_s - 3 * weights / 1e12 + (12 / 8 * SHAPE.num_parameters - 2 * weights) / 50e9
    )
    assert stays.ipc_gain_s() == pytest.approx(expected, rel=0.01)
    for words in (("rollout.tensor_parallel_size=2", "rollout.num_workers=4"), ("placement=disaggregated",)):
        assert durations_of(memory_of(*words)).ipc_gain_s() is None
