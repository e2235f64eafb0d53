"""Engines and trainers that share devices take turns on them: who must be gone before who comes."""

import asyncio

import pytest

from penstock.conf.errors import ConfigError, DeadlineExceeded, WeightError, WorkerDied
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.turns import DeviceTurns
from tests.fakes.actors import Call
from tests.orchestrator.noting_actors import NotingActors

TWO_EACH = {"rollout": 2, "scorer": 0, "trainer": 2}


def test_turns_need_a_synchronous_run():
    with pytest.raises(ConfigError, match=r"placement=colocated takes turns.*max_staleness=1.*Set max_staleness=0"):
        load_config(["placement=colocated", "max_staleness=1", "data.path=x.jsonl", "model=tiny"])


def test_turns_on_gpus_need_parts_of_them():
    words = ["placement=colocated", "data.path=x.jsonl", "model=tiny", "rollout.engine=vllm"]
    with pytest.raises(ConfigError, match=r"do not share a GPU.*0\.5 and 0\.5"):
        load_config([*words, "trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1"])
    halves = [*words, "trainer.num_gpus_per_rank=0.5", "rollout.num_gpus_per_worker=0.5"]
    load_config(halves)
    parallel = [*halves, "rollout.tensor_parallel_size=2"]
    load_config([*parallel, "trainer.num_ranks=2"])
    with pytest.raises(ConfigError, match=r"GPUs of 2 ranks, and there are 1\. Lower one of them, or set trainer"):
        load_config(parallel)
    zero = [*halves, "trainer.engine=deepspeed", "trainer.dtype=bfloat16"]
    load_config([*zero, "trainer.deepspeed.zero_stage=2"])
    with pytest.raises(ConfigError, match=r"zero_stage=1 with trainer\.dtype=bfloat16 stays on the GPU.*zero_stage=2"):
        load_config([*zero, "trainer.deepspeed.zero_stage=1"])


class Store:
    def __init__(self, calls, answers=True):
        self.calls, self.answers = calls, answers

    async def batch_ready(self):
        self.calls.append(Call("batch", "ready"))
        await asyncio.sleep(0 if self.answers else 60)
        return True


def turns(actors, config=None, **options):
    if config is None:
        config = RunConfig(placement="colocated")
        config.trainer.step_timeout_s = 0.05

    async def reload():
        actors.calls.append(Call("weights", "reload"))

    return DeviceTurns(actors, Store(actors.calls, **options), config, reload)


def test_engines_sleep_before_trainers_come_and_trainers_go_before_engines_wake():
    actors = NotingActors(TWO_EACH | {"scorer": 1})

    async def body():
        both = turns(actors)
        await both.generation()
        actors.calls.clear()
        await both.training(1)
        await both.generation()

    asyncio.run(body())
    assert actors.said == [
        "batch ready", "rollout-0 sleep", "rollout-1 sleep", "scorer-0 leave_device", "trainer-0 take_device",
        "trainer-1 take_device", "trainer-0 leave_device", "trainer-1 leave_device", "rollout-0 wake",
        "rollout-1 wake",
    ]  # fmt: skip


def test_a_batch_that_never_comes_is_a_deadline_by_the_steps_name():
    with pytest.raises(DeadlineExceeded, match="step 7, waiting for its batch: Store"):
        asyncio.run(turns(NotingActors(TWO_EACH), answers=False).training(7))


def test_with_devices_of_their_own_nobody_waits_for_a_turn():
    actors = NotingActors(TWO_EACH)

    async def body():
        apart = turns(actors, RunConfig())
        await apart.training(1)
        await apart.generation()

    asyncio.run(body())
    assert actors.said == []


def test_an_engine_that_fails_in_its_turn_is_ended_and_the_turn_goes_on():
    for call in ("wake", "sleep"):
        actors = NotingActors(TWO_EACH, answers={"rollout-1": {call: WorkerDied("rollout-1 has died")}})

        async def body(actors=actors):
            both = turns(actors)
            await both.generation()
            await both.training(1)

        asyncio.run(body())
        assert actors.removed == ["rollout-1"]
        assert actors.said[-2:] == ["trainer-0 take_device", "trainer-1 take_device"]


def test_a_rank_that_does_not_make_room_is_ended_and_missed_in_its_turn():
    death = WorkerDied("trainer-0 has died")
    actors = NotingActors(TWO_EACH, answers={"trainer-0": {"leave_device": death, "take_device": death}})

    async def body():
        both = turns(actors)
        await both.generation()
        assert actors.killed == ["trainer-0"]
        assert actors.said[-2:] == ["rollout-0 wake", "rollout-1 wake"]
        with pytest.raises(WorkerDied, match="trainer-0"):
            await both.training(1)

    asyncio.run(body())


def test_what_another_actor_would_fail_with_too_ends_the_turn():
    actors = NotingActors(TWO_EACH, answers={"rollout-0": {"wake": WeightError("out of memory")}})
    with pytest.raises(WeightError, match="out of memory"):
        asyncio.run(turns(actors).generation())


def test_an_engine_starts_in_its_turn_and_the_next_turn_waits_for_it():
    actors = NotingActors(TWO_EACH)

    async def body():
        both = turns(actors)
        await both.generation()
        await both.training(1)
        started = asyncio.Event()

        async def start():
            async with both.hold("rollout"):
                actors.calls.append(Call("rollout-9", "starts"))
                await started.wait()
                actors.calls.append(Call("rollout-9", "serves"))

        starting = asyncio.create_task(start())
        await asyncio.sleep(0)
        assert "rollout-9 starts" not in actors.said
        await both.generation()
        training = asyncio.create_task(both.training(2))
        while "rollout-9 starts" not in actors.said or "batch ready" not in actors.said[-2:]:
            await asyncio.sleep(0)
        assert not training.done()
        started.set()
        await asyncio.gather(starting, training)

    asyncio.run(body())
    assert actors.said.index("rollout-9 serves") < len(actors.said) - 4
    assert actors.said[-4:-2] == ["rollout-0 sleep", "rollout-1 sleep"]


def test_ranks_that_take_the_place_of_others_start_while_engines_sleep():
    actors = NotingActors(TWO_EACH)

    async def body():
        both = turns(actors)
        await both.generation()
        actors.calls.clear()
        async with both.hold("trainer"):
            actors.calls.append(Call("trainer", "starts"))
        async with both.hold("reward"):
            actors.calls.append(Call("reward", "starts"))

    asyncio.run(body())
    assert actors.said == ["rollout-0 sleep", "rollout-1 sleep", "trainer starts", "reward starts"]


def test_a_step_that_is_taken_again_begins_with_a_turn_of_the_engines():
    """A new store may lack some of its samples, and engines that slept have no weights."""
    actors = NotingActors(TWO_EACH)

    async def body():
        both = turns(actors)
        await both.generation()
        await both.training(1)
        actors.calls.clear()
        await both.training(1)

    asyncio.run(body())
    assert actors.said[:6] == [
        "trainer-0 leave_device", "trainer-1 leave_device", "rollout-0 wake", "rollout-1 wake", "weights reload",
        "batch ready",
    ]  # fmt: skip


@pytest.mark.parametrize("gpus", [0.5, 0])
def test_a_scorer_on_the_gpu_of_a_rank_starts_while_engines_have_it(gpus):
    actors = NotingActors(TWO_EACH | {"scorer": 1})
    config = RunConfig(placement="colocated")
    config.trainer.num_gpus_per_rank = config.rollout.num_gpus_per_worker = gpus

    async def body():
        both = turns(actors, config)
        await both.generation()
        await both.training(1)

        async def start():
            async with both.hold("scorer"):
                actors.calls.append(Call("scorer-9", "starts"))

        starting = asyncio.create_task(start())
        await asyncio.sleep(0)
        assert ("scorer-9 starts" in actors.said) is (gpus == 0)
        await both.generation()
        await starting
        assert "scorer-9 starts" in actors.said

    asyncio.run(body())
