"""What `penstock validate` says of the weights' way."""

from dataclasses import replace

import pytest

from penstock.conf.errors import ResourceError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.validate import (
    check_shared_memory,
    describe_times,
    describe_wait,
    describe_weights,
    way_of,
)
from penstock.workers.weights.publication.costs import SharedMemory

TINY = ["model=tiny", "data.path=x.jsonl"]
GPUS = ["trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1"]
MILLION = 10**6
"""Elements: 4 MB a publication in float32, 24 MB for the copies that ranks keep."""


def test_the_bytes_of_a_publication_are_told() -> None:
    told = describe_weights(load_config(TINY))
    assert told.startswith("shm: through shared memory, and from node to node by their agents; ")
    assert "MB a publication, 2 of them on each node with engines" in told


def test_the_seconds_of_a_publication_are_told_with_gpus() -> None:
    words = ["cluster.cpus_per_worker=4", "trainer.num_ranks=8", "rollout.tensor_parallel_size=4"]
    way = way_of(load_config([*TINY, *GPUS, *words]), num_bytes=64 * 10**9)
    assert (way.num_ranks, way.gpus_per_engine, way.threads_per_rank) == (8, 4, 4)
    told = describe_times(replace(way, threads_per_node=8))
    # 8 GB a rank at 25 GB/s, 64 GB by 8 lanes at 3.2 and 8 threads at 6.4; 16 GB a GPU of the engine at 25
    assert "PCIe 4 x16: 1.6 s a publication, 3.8 s to other nodes, then a pause of 0.64 s an engine" in told
    told = describe_weights(load_config([*TINY, *GPUS]))
    assert told.count("PCIe 5 x16") == 1
    assert "the next step waits for all of it (max_staleness=0)" in told
    assert "PCIe" not in describe_weights(load_config(TINY))


def test_the_part_of_it_is_told_that_a_step_waits_for() -> None:
    config = load_config([*TINY, *GPUS, "max_staleness=1", "trainer.num_ranks=8"])
    # 8 GB a rank, of which three times as many bytes are read and written, at 1 TB/s
    assert "copies on the GPUs, 0.024 s of it" in describe_wait(config, way_of(config, num_bytes=64 * 10**9))
    assert "(trainer.offload)" in describe_weights(
        load_config([*TINY, *GPUS, "max_staleness=1", "trainer.offload=true"])
    )


def test_what_is_streamed_keeps_no_copies_and_says_so() -> None:
    told = describe_weights(load_config([*TINY, *GPUS, "weights.transport=nccl"]))
    assert told == "nccl, as asked for: a death is a return to the checkpoint, and ranks keep no copies"


def test_a_model_that_is_not_here_has_no_size_yet() -> None:
    assert "known once the model is here" in describe_weights(load_config([*TINY, "model.path=Qwen/of-the-hub"]))


def test_a_machine_without_room_for_publications_is_refused() -> None:
    with pytest.raises(
        ResourceError, match=r"This machine has 64 bytes .*need 8,000,000 .*--shm-size.*sizeLimit.*nccl"
    ):
        check_shared_memory(load_config(TINY), MILLION, SharedMemory(64, 64))


def test_copies_that_do_not_fit_are_told_with_the_promise_that_lapses() -> None:
    config, large = load_config(TINY), 10**9
    (told,) = check_shared_memory(config, MILLION, SharedMemory(large, 31 * MILLION))
    assert "(24.0 MB, faults.keep_state) do not fit" in told
    assert "the death of a rank is a return to the newest checkpoint" in told
    assert check_shared_memory(config, MILLION, SharedMemory(large, 32 * MILLION)) == []


@pytest.mark.parametrize("words", [["faults.keep_state=false"], ["trainer.lora.rank=8"]])
def test_copies_that_nobody_makes_need_no_room(words: list[str]) -> None:
    assert check_shared_memory(load_config([*TINY, *words]), MILLION, SharedMemory(10**9, 0)) == []
