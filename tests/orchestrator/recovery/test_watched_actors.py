"""Actors of a run, as the one who watches them sees them: by their answers, their stacks and their ends."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.conf.errors import DeadlineExceeded
from penstock.conf.faults import FaultsConfig
from penstock.conf.reward import RewardConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.network.connection import new_token
from penstock.orchestrator.cluster.fleet.fleet import RollCall
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.orchestrator.recovery.liveness import ALIVE, Liveness, VerdictKind
from penstock.workers.node.node_agent import STACKS
from penstock.workers.runtime.serving import SERVING, STARTING, WAITING
from tests.store.driver import make_spec

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.real

CONFIG = RunConfig(faults=FaultsConfig(heartbeat_s=0.2, heartbeat_timeout_s=1.0))
Make = Callable[..., Any]


@pytest.fixture
def make(cluster: str) -> Iterator[Make]:
    """Makes actors, which end with the test."""
    handles = []

    def made(cls: type, *arguments: Any, max_concurrency: int = 1000) -> Any:
        options = {"num_cpus": 0, "max_concurrency": max_concurrency}
        handles.append(ray.remote(cls).options(**options).remote(*arguments))
        return handles[-1]

    yield made
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def agent(make: Make, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """And where processes write their stacks."""
    from penstock.workers.node.node_actor import NodeAgentActor

    handle = make(NodeAgentActor, str(tmp_path / "penstock-run"), new_token(), None, None, None)
    ray.get(handle.facts.remote())
    yield handle, str(tmp_path / "penstock-run" / STACKS)
    ray.get(handle.close.remote())


def rollout(make: Make) -> Any:
    from penstock.workers.protocols import EngineSpec
    from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec

    return make(Rollout, RolloutSpec("Rollout-1", EngineSpec(RolloutConfig(engine="scripted")), 0, 2))


def watched(liveness: Liveness, handle: Any, until: VerdictKind) -> str:
    """Heartbeats to an actor until it is judged so; the reason."""
    pending, deadline = None, time.monotonic() + 60
    while time.monotonic() < deadline:
        pending = pending or handle.progress.remote()
        done, _ = ray.wait([pending], timeout=CONFIG.faults.heartbeat_s)
        if done:
            liveness.heard(time.monotonic(), ray.get(pending))
            pending = None
        verdict = liveness.judge(time.monotonic())
        if verdict.state is until:
            return verdict.reason
    raise AssertionError(f"never judged {until}")


def test_a_stopped_process_is_silent_and_is_ended_with_a_recoverable_error(make: Make, agent: tuple[Any, str]) -> None:
    """Its stacks are shown before it is ended."""
    node, stacks = agent
    member = rollout(make)
    ray.get(member.start.remote())
    process = ray.get(member.process.remote(stacks))
    assert ray.get(member.progress.remote()).phase == SERVING
    liveness = Liveness("rollout", CONFIG, time.monotonic())
    assert watched(liveness, member, VerdictKind.ALIVE) == ""
    psutil.Process(process.pid).suspend()
    assert watched(liveness, member, VerdictKind.SILENT) == "no answer to a heartbeat for 1 s"
    text = ray.get(node.dump_stacks.remote(process, "Rollout-1"))
    assert f"Rollout-1, process {process.pid} (stopped)" in text
    assert "main_loop" in text
    assert ray.get(node.kill.remote(process))
    with pytest.raises(ray.exceptions.RayError) as gone:
        ray.get(member.progress.remote(), timeout=900)
    assert is_recoverable(gone.value)


def test_a_process_that_goes_on_after_a_stop_is_alive_again(make: Make, agent: tuple[Any, str]) -> None:
    member = rollout(make)
    process = ray.get(member.process.remote(agent[1]))
    liveness = Liveness("rollout", CONFIG, time.monotonic())
    psutil.Process(process.pid).suspend()
    watched(liveness, member, VerdictKind.SILENT)
    psutil.Process(process.pid).resume()
    watched(liveness, member, VerdictKind.ALIVE)
    assert liveness.judge(time.monotonic()) == ALIVE


def test_an_agent_tells_what_its_neighbours_say_except_for_a_stopped_one(make: Make, agent: tuple[Any, str]) -> None:
    """The stopped one is asked by the watch itself."""
    node, stacks = agent
    members = {f"Rollout-{index}": rollout(make) for index in range(2)}
    stopped = ray.get([member.process.remote(stacks) for member in members.values()])[1]
    agents = NodeAgents("run", "run", CONFIG.cluster)
    agents.members = {"node": ("Agent", node)}
    roll_call = RollCall(lambda: members, agents, lambda name: "node", many=1)

    def asked(timeout_s: float) -> list[Any]:
        return asyncio.run(roll_call.ask(list(members.items()), "progress", phase="heartbeat", timeout_s=timeout_s))

    assert [said.phase for said in asked(60.0)] == [STARTING, STARTING]
    psutil.Process(stopped.pid).suspend()
    answers, late = asked(2.0)
    assert answers.phase == STARTING
    assert isinstance(late, DeadlineExceeded)
    psutil.Process(stopped.pid).resume()


def test_every_light_actor_says_who_it_is_and_what_it_is_at(make: Make, agent: tuple[Any, str]) -> None:
    from penstock.algorithms.graph.dataflow import Dataflow
    from penstock.workers.compute import Compute
    from penstock.workers.prompts.prompts_actor import Prompts
    from penstock.workers.reward.reward_actor import Reward, RewardPlan

    def advantage(reward: Any) -> Any:
        return reward

    flow = Dataflow().compute(advantage, reads=["reward"], writes=["advantage"])
    members = [
        make(Reward, RewardPlan("Reward-0", RewardConfig(function="digits"))),
        make(Compute, "Compute-advantage", flow.stages[0], flow.columns),
        make(Prompts, CONFIG, "", "prompts"),
    ]
    pids = [ray.get(member.process.remote(agent[1])).pid for member in members]
    assert sorted(int(path.stem) for path in Path(agent[1]).iterdir()) == sorted(pids)
    assert {ray.get(member.progress.remote()).phase for member in members} == {STARTING}
    ray.get(members[1].start.remote())
    assert ray.get(members[1].progress.remote()).phase == SERVING


def test_a_trainer_answers_while_it_waits_for_its_batch(make: Make, agent: tuple[Any, str], tmp_path: Path) -> None:
    from penstock.algorithms.graph.stage import TrainedPolicy
    from penstock.algorithms.losses import sft_loss
    from penstock.conf.model import FreshModelConfig
    from penstock.conf.trainer import TrainerConfig
    from penstock.store.client.store_client import StoreClient
    from penstock.store.service.store_actor import create_store_actor, end_store_actor
    from penstock.workers.fresh_model import build_fresh_model
    from penstock.workers.trainer.rank_spec import TrainerSpec
    from penstock.workers.trainer.trainer_actor import Trainer

    model = FreshModelConfig(num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1)
    build_fresh_model(tmp_path / "model", model, seed=1)
    store = create_store_actor(make_spec(), "members-test", name="trainers")
    spec = TrainerSpec(
        name="Trainer-policy-0",
        config=TrainerConfig(),
        model_path=str(tmp_path / "model"),
        stage="train",
        policies=(TrainedPolicy("policy", sft_loss),),
    )
    trainer = make(Trainer, spec, max_concurrency=3)
    assert ray.get(trainer.progress.remote()).phase == STARTING
    ray.get(trainer.start.remote(None))
    ray.get(trainer.attach.remote(store))
    step = trainer.step.remote(1)
    while ray.get(trainer.progress.remote()).phase != WAITING:
        time.sleep(0.05)
    text = ray.get(agent[0].dump_stacks.remote(ray.get(trainer.process.remote(agent[1])), "Trainer-policy-0"))
    assert "lease_shared" in text
    asyncio.run(StoreClient(store).close("the run is over"))
    assert ray.get(step, timeout=900) is None
    end_store_actor(store)
