"""Ranks are called one call after the other, and replaced together; each engine is replaced alone. Both as a run does,
and whose requests end them again and again hears of it alone."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.conf.errors import DataError, WorkerDied, WorkerFailed
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.serve import cluster_backend as backend
from penstock.serve.backend import BackendFailed, DeadlyRequest, ModelFacts, RequestFailed, TrainerLost
from penstock.workers.protocols import AdamParams, AdapterSpec, Datum, ForwardOutput, LossCall
from tests.virtual_time import run_virtually

RANKS, ENGINES = ["Trainer-0", "Trainer-1"], ["Rollout-0", "Rollout-1"]
LOSS = LossCall("cross_entropy")
DATA = [Datum(np.zeros(2, np.int32), np.zeros(2, np.int64), {}) for _ in range(4)]
START_S = 30.0
STATE = SimpleNamespace(for_sampling=lambda: "state")


class Actor:
    """A rank or an engine: a call takes a second. `dying`: methods that end it, or arguments of theirs."""

    def __init__(self, fleet, name):
        self.fleet, self.name, self.is_dead, self.samplers = fleet, name, False, []

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *arguments: self._answered(method, *arguments))

    async def _answered(self, method, *arguments):
        self.fleet.calls.append((method, self.name))
        deadly = [one for one in (method, *map(str, arguments)) if self.fleet.dying[one] > 0]
        for one in deadly:
            self.fleet.dying[one] -= 1
            self.is_dead = True
        await asyncio.sleep(0 if deadly else 1)
        if self.fleet.failing == method:
            raise WorkerFailed(f"{self.name} failed with KeyError")
        if self.is_dead:
            raise WorkerDied(f"{self.name} has died")
        if method == "add_adapter":
            self.samplers.append(arguments[0])
        if method == "forward_adapter":
            return ForwardOutput([np.zeros(len(datum.targets)) for datum in arguments[1]], {"loss": 1.0})
        return {"grad_norm": 1.0}


class Fleet(MemberTable):
    def __init__(self):
        plan = [ActorPlan(name, "trainer", stage="train") for name in RANKS]
        plan += [ActorPlan(name, "rollout", stage="rollout") for name in ENGINES]
        super().__init__(plan, START_S, SimpleNamespace(end=lambda handle: setattr(handle, "is_dead", True)))
        self.calls, self.dying, self.failing = [], Counter(), ""
        self.starts = []
        """Times of all starts."""
        self.failures = Counter()
        """Starts of each name that fail."""
        self.add([(name, self.made(name)) for name in (*RANKS, *ENGINES)])

    def made(self, name):
        self.next_incarnation(name)
        return Actor(self, name)

    async def start_members(self, names):
        self.starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(START_S)
        if self.failures[names[0]]:
            self.failures[names[0]] -= 1
            raise WorkerDied(f"{names[0]} has died: no memory")
        members = [(name, self.made(name)) for name in names]
        self.begin(members)
        return members


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory.create(RunConfig(name="serve", output_dir=str(tmp_path)))
    yield made
    made.close()


@pytest.fixture
def made(directory, monkeypatch):
    monkeypatch.setattr(backend.ray, "put", lambda state: state)
    config = RunConfig(trainer=TrainerConfig(num_ranks=2), rollout=RolloutConfig(num_workers=2))
    fleet = Fleet()
    return fleet, backend.ClusterBackend(fleet, config, ModelFacts("m", "/m", 64, 16, 8), directory, lambda text: None)


def run(backend, scenario):
    """Run a scenario beside what replaces engines."""

    async def beside():
        running = asyncio.ensure_future(backend.run())
        try:
            return await scenario()
        finally:
            running.cancel()
            await asyncio.wait([running])

    return run_virtually(beside())


class Call(SimpleNamespace):
    num_samples = 1

    def __str__(self):
        return self.name


async def lost(ranks, fleet):
    """Lose a rank while a request is at work."""
    fleet.dying["step_adapter"] = 1
    with pytest.raises(TrainerLost, match="has died") as caught:
        await ranks.optim_step("x", AdamParams())
    return caught.value


def test_every_rank_has_a_share_and_calls_do_not_overlap(made):
    fleet, ranks = made

    async def scenario():
        await ranks.create_adapter("x", AdapterSpec(4, 0))
        output, metrics = await asyncio.gather(
            ranks.forward("x", DATA, LOSS, backward=True), ranks.optim_step("x", AdamParams())
        )
        assert (len(output.logprobs), metrics) == (4, {"grad_norm": 1.0})
        with pytest.raises(DataError, match="adapters have a rank of 1 to 8"):
            await ranks.create_adapter("y", AdapterSpec(9, 0))

    run_virtually(scenario())
    methods = [method for method, _ in fleet.calls]
    assert methods == ["create_adapter"] * 2 + ["forward_adapter"] * 2 + ["step_adapter"] * 2


def test_ranks_whose_start_has_failed_are_started_again_after_a_pause(made, directory):
    fleet, ranks = made
    fleet.failures["Trainer-0"] = 1

    async def scenario():
        before = dict(fleet.actors)
        await ranks.bring_back("alice", await lost(ranks, fleet))
        assert all(fleet.handle_of(name) is not before[name] for name in RANKS)
        assert await ranks.optim_step("x", AdamParams()) == {"grad_norm": 1.0}

    run_virtually(scenario())
    first, second = fleet.starts
    assert second == first + START_S + 1.0  # faults.pause_s
    assert [event["kind"] for event in directory.read_events()] == ["fault", "fault", "recovered"]


def test_ranks_that_cannot_be_started_end_the_server_by_name(made):
    fleet, ranks = made
    fleet.failures["Trainer-0"] = 2

    async def scenario():
        with pytest.raises(BackendFailed, match=r"Trainer-0 to Trainer-1 .* Trainer-0 has died: no memory"):
            await ranks.bring_back("alice", await lost(ranks, fleet))

    run_virtually(scenario())


def test_who_loses_ranks_beyond_the_budget_is_named_and_the_ranks_come_back(made):
    fleet, ranks = made

    async def scenario():
        for _ in range(3):  # faults.max_restarts
            for tenant in ("alice", "bob"):
                await ranks.bring_back(tenant, await lost(ranks, fleet))
        with pytest.raises(DeadlyRequest, match="ranks were lost again after 3 restarts in 600 s, each time"):
            await ranks.bring_back("alice", await lost(ranks, fleet))
        with pytest.raises(DeadlyRequest):
            await ranks.bring_back("bob", await lost(ranks, fleet))
        await ranks.bring_back("alice", await lost(ranks, fleet))  # its budget begins anew
        assert await ranks.optim_step("x", AdamParams()) == {"grad_norm": 1.0}

    run_virtually(scenario())


def test_a_start_that_fails_once_ends_no_server_though_it_spends_a_budget(made):
    fleet, ranks = made

    async def scenario():
        for _ in range(2):
            await ranks.bring_back("alice", await lost(ranks, fleet))
        fleet.failures["Trainer-0"] = 1
        with pytest.raises(DeadlyRequest):
            await ranks.bring_back("alice", await lost(ranks, fleet))
        assert await ranks.optim_step("x", AdamParams()) == {"grad_norm": 1.0}

    run_virtually(scenario())


def test_ranks_that_a_request_fails_on_are_replaced_since_the_others_wait(made):
    fleet, ranks = made
    fleet.failing = "forward_adapter"

    async def scenario():
        with pytest.raises(RequestFailed, match="KeyError") as caught:
            await ranks.forward("x", DATA, LOSS, backward=True)
        assert isinstance(caught.value, TrainerLost)  # no adapter is on ranks that others have taken the place of

    run_virtually(scenario())


def test_an_engine_whose_start_has_failed_is_started_again_while_another_serves(made):
    fleet, one = made
    fleet.failures["Rollout-0"] = 1

    async def scenario():
        fleet.dying["sample"] = 1
        assert await one.sample(None, Call(name="a"), "alice") == {"grad_norm": 1.0}
        assert fleet.handle_of("Rollout-0") is None
        await asyncio.sleep(3 * START_S)
        assert fleet.handle_of("Rollout-0") is not None
        assert one.num_lost == 1

    run(one, scenario)


def test_an_engine_has_what_was_published_while_it_started_and_nothing_else(made):
    fleet, one = made

    async def scenario():
        await one.publish("old", STATE)
        fleet.dying["sample"] = 1
        await one.sample("old", Call(name="a"), "alice")
        await one.publish("new", STATE)
        await asyncio.sleep(START_S - 1.5)  # the first is being brought to it
        await asyncio.gather(one.publish("last", STATE), one.drop_sampler("old"))
        await asyncio.sleep(START_S)
        engine = fleet.handle_of("Rollout-0")
        assert sorted(engine.samplers) == ["last", "new", "old"]
        assert [method for method, name in fleet.calls if name == "Rollout-0"].count("drop_adapter") == 1

    run(one, scenario)


def test_an_engine_that_is_lost_beyond_the_budget_ends_the_server_by_name(made):
    fleet, one = made

    async def scenario():
        running = asyncio.ensure_future(one.run())
        for _ in range(4):  # faults.max_restarts and one more
            await one.publish("a", STATE)
            fleet.dying["drop_adapter"] = 1
            await one.drop_sampler("a")
            await asyncio.sleep(3 * START_S)
        with pytest.raises(BackendFailed, match=r"Rollout-0 was lost again after faults\.max_restarts restarts"):
            await running
        with pytest.raises(BackendFailed, match="was lost again"):
            await one.sample(None, Call(name="a"), "alice")

    run_virtually(scenario())


def test_samples_wait_for_an_engine_and_hear_that_none_comes_back(made):
    fleet, one = made
    fleet.failures.update({"Rollout-0": 2, "Rollout-1": 2})
    fleet.dying["sample"] = 2

    async def scenario():
        running = asyncio.ensure_future(one.run())
        waiting = asyncio.ensure_future(one.sample(None, Call(name="a"), "alice"))
        with pytest.raises(BackendFailed, match=r"Rollout-\d cannot be started again.* no memory"):
            await waiting
        with pytest.raises(BackendFailed, match="no memory"):
            await running

    run_virtually(scenario())


def test_a_sample_that_ends_engines_is_given_up_and_those_beside_it_are_drawn(made):
    fleet, one = made
    fleet.dying["deadly"] = 1000

    async def scenario():
        for _ in range(4):  # more losses than two engines have restarts
            others = [asyncio.ensure_future(one.sample(None, Call(name="good"), "bob")) for _ in range(4)]
            with pytest.raises(DeadlyRequest, match="engines were lost 3 times while a request of this key"):
                await one.sample(None, Call(name="deadly"), "alice")
            assert await asyncio.gather(*others) == [{"grad_norm": 1.0}] * 4
        assert one.num_lost == 12

    run(one, scenario)


def test_samples_of_one_tenant_that_each_end_an_engine_are_charged_to_it_alone(made):
    fleet, one = made

    async def scenario():
        refusals = []
        for number in range(40):  # each is drawn at its second try
            await asyncio.gather(*(one.sample(None, Call(name="good"), "bob") for _ in range(4)))
            fleet.dying[f"deadly-{number}"] = 1
            try:
                await one.sample(None, Call(name=f"deadly-{number}"), "alice")
            except DeadlyRequest as error:
                refusals.append(str(error))
            await asyncio.sleep(3)
        assert any("requests of this key alone were at work" in text for text in refusals)
        assert await one.sample(None, Call(name="good"), "bob") == {"grad_norm": 1.0}

    run(one, scenario)


def test_tenants_that_lost_an_engine_together_share_none_for_a_while(made):
    fleet, one = made
    shared = []

    async def scenario():
        fleet.dying["deadly"] = 1
        work = [asyncio.ensure_future(one.sample(None, Call(name="good"), "bob")) for _ in range(4)]
        await asyncio.sleep(0)
        await one.sample(None, Call(name="deadly"), "alice")
        await asyncio.gather(*work)
        await asyncio.sleep(3 * START_S)
        work = [asyncio.ensure_future(one.sample(None, Call(name="good"), name)) for name in ("alice", "bob") * 8]
        while not all(task.done() for task in work):
            shared.extend(users for users in one._at_work.values() if len(users) > 1)
            await asyncio.sleep(0.1)
        assert [task.result() for task in work] == [{"grad_norm": 1.0}] * 16

    run(one, scenario)
    assert not shared


@pytest.mark.parametrize("deaths", [1, 2, 3, 1000])
def test_an_adapter_whose_loading_ends_engines_is_given_up(made, deaths):
    fleet, one = made

    async def scenario():
        running = asyncio.ensure_future(one.run())
        await one.publish("good", STATE)
        for number in range(3):
            name = f"bad-{number}"
            fleet.dying[name] = deaths
            await one.publish(name, STATE)
            await asyncio.sleep(3 * START_S)
            fleet.dying[name] = 0
            if deaths > 2:  # two engines, and each again while it starts
                with pytest.raises(DeadlyRequest, match="while they loaded weights of this key"):
                    await one.sample(name, Call(name="a"), "alice")
            assert await one.sample("good", Call(name="a"), "bob") == {"grad_norm": 1.0}
            await one.drop_sampler(name)
        assert not running.done()
        assert len(fleet.role("rollout")) == 2

    run_virtually(scenario())


def test_an_adapter_that_engines_refuse_is_not_brought_to_the_next_ones(made):
    fleet, one = made

    async def scenario():
        fleet.failing = "add_adapter"
        with pytest.raises(WorkerFailed):
            await one.publish("bad", STATE)
        fleet.failing = ""
        fleet.dying["sample"] = 1
        await one.sample(None, Call(name="a"), "alice")
        await asyncio.sleep(3 * START_S)
        assert all("bad" not in handle.samplers for _, handle in fleet.role("rollout"))

    run(one, scenario)
