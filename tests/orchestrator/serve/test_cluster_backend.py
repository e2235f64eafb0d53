"""Ranks are called one call after the other, and replaced together."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.conf.errors import DataError, WorkerDied
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.serve.actors import backend
from penstock.orchestrator.serve.backend import ModelFacts, TrainerLost
from penstock.workers.training_calls import AdamParams, AdapterSpec, Datum, ForwardOutput, LossCall


class Rank:
    """A rank whose methods answer at once."""

    def __init__(self, fleet, name):
        self.fleet, self.name = fleet, name

    def __getattr__(self, method):
        async def answered(*arguments):
            self.fleet.calls.append((method, self.name))
            await asyncio.sleep(0)
            if self.fleet.dying == method:
                self.fleet.dying = ""
                raise WorkerDied(f"{self.name} has died")
            if method == "forward_adapter":
                return ForwardOutput([np.zeros(len(datum.targets)) for datum in arguments[1]], {"loss": 1.0})
            return {"grad_norm": 1.0}

        return SimpleNamespace(remote=answered)


class Fleet:
    def __init__(self):
        self.calls, self.dying, self.num_started = [], "", 0
        self.members = [(name, Rank(self, name)) for name in ("a", "b")]

    def role(self, name):
        return self.members if name == "trainer" else []

    def teams(self, name):
        return [["a", "b"]]

    def remove(self, names):
        self.members = []

    async def start_members(self, names):
        self.num_started += 1
        return [(name, Rank(self, name)) for name in names]

    def add(self, members):
        self.members = members


@pytest.fixture
def made(monkeypatch):
    async def answers(calls, phase, timeout_s):
        return await asyncio.gather(*(call for _, call in calls))

    monkeypatch.setattr(backend, "answers", answers)
    fleet, config = Fleet(), RunConfig(trainer=TrainerConfig(num_ranks=2))
    return fleet, backend.ClusterBackend(fleet, config, ModelFacts("m", "/m", 64, 16, 8), lambda text: None)


DATA = [Datum(np.zeros(2, np.int32), np.zeros(2, np.int64), {}) for _ in range(4)]


def test_every_rank_has_a_share_and_calls_do_not_overlap(made):
    fleet, ranks = made

    async def scenario():
        await ranks.create_adapter("x", AdapterSpec(4, 0))
        output, metrics = await asyncio.gather(
            ranks.forward("x", DATA, LossCall("cross_entropy"), backward=True), ranks.optim_step("x", AdamParams())
        )
        assert (len(output.logprobs), metrics) == (4, {"grad_norm": 1.0})
        with pytest.raises(DataError, match="adapters have a rank of 1 to 8"):
            await ranks.create_adapter("y", AdapterSpec(9, 0))

    asyncio.run(scenario())
    methods = [method for method, _ in fleet.calls]
    assert methods == ["create_adapter"] * 2 + ["forward_adapter"] * 2 + ["step_adapter"] * 2


def test_after_a_death_all_ranks_are_others_and_the_caller_hears_of_it(made):
    fleet, ranks = made
    fleet.dying = "step_adapter"

    async def scenario():
        before = [rank for _, rank in fleet.members]
        with pytest.raises(TrainerLost, match="has died"):
            await ranks.optim_step("x", AdamParams())
        assert (fleet.num_started, ranks.num_lost) == (1, 1)
        assert not {id(rank) for _, rank in fleet.members} & {id(rank) for rank in before}
        assert await ranks.optim_step("x", AdamParams()) == {"grad_norm": 1.0}

    asyncio.run(scenario())
