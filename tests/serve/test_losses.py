"""Whose requests end ranks or engines again and again is refused, and nobody else; what cannot be brought back ends the
server by name, and its next start goes on."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest

from penstock.conf.serve import ServeConfig, TenantConfig
from penstock.serve import training_clients
from penstock.serve.backend import BackendFailed, DeadlyRequest
from penstock.serve.command import Server, ServerFailed
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import forward_body
from tests.serve.test_server import Client, sample_body, serve

TENANTS = {"alice": TenantConfig(key="tml-alice"), "bob": TenantConfig(key="tml-bob")}
CONFIG = ServeConfig(port=0, poll_s=0.1, drain_s=5.0, tenants=TENANTS)


async def forward(client, model, seq, **config):
    body = forward_body([1, 2, 3], 1.0, config=dict.fromkeys(config, 1.0) or None)
    future = await client.post("forward_backward", {"model_id": model, "seq_id": seq, **body})
    return await client.result(future)


async def model_of(client):
    return (await client.result(await client.adapter(await client.session())))["model_id"]


def test_who_loses_ranks_again_and_again_is_refused_for_a_while(tmp_path, monkeypatch):
    backend = FakeBackend()

    async def act(server, http):
        alice, bob = Client(http, "tml-alice"), Client(http, "tml-bob")
        hers, his = await model_of(alice), await model_of(bob)
        assert "error" not in await forward(alice, hers, 1)
        refused = await forward(alice, hers, 2, deadly=True)
        assert refused["category"] == "user"
        assert "ranks were lost again after 3 restarts" in refused["error"]
        assert "s: ask for less at a time after that" in refused["error"]
        assert backend.losses == {"alice": 4}
        assert "ranks were lost again" in (await forward(alice, hers, 3))["error"]
        made = await alice.result(await alice.adapter(hers.partition(":")[0], 1))
        assert "ranks were lost again" in made["error"]
        assert "error" not in await forward(bob, his, 1)
        assert server.service.trouble == ""
        later = time.monotonic() + backend.window_s
        monkeypatch.setattr(training_clients, "time", SimpleNamespace(monotonic=lambda: later, time=time.time))
        assert "error" not in await forward(alice, hers, 4)

    serve(tmp_path, act, backend, CONFIG)


def test_whose_sample_ends_engines_is_refused_and_the_others_sample_on(tmp_path):
    class Backend(FakeBackend):
        async def sample(self, sampler, call, tenant):
            if call.num_samples == 7:
                raise DeadlyRequest("engines were lost 3 times while a request of this key was at work")
            return await super().sample(sampler, call, tenant)

    async def act(_, http):
        alice, bob = Client(http, "tml-alice"), Client(http, "tml-bob")
        hers, his = await alice.own_sampler(await model_of(alice), 1), await bob.own_sampler(await model_of(bob), 1)
        for seq, num in enumerate((7, 1)):
            answer = await alice.result(await alice.post("asample", sample_body(hers, seq, num_samples=num)))
            assert answer["category"] == "user"
            assert "engines were lost 3 times" in answer["error"]
        assert "sequences" in await bob.result(await bob.post("asample", sample_body(his, 0)))

    serve(tmp_path, act, Backend(), CONFIG)


@pytest.mark.parametrize("part", ["training", "sampling", "engines"])
def test_what_cannot_be_brought_back_ends_the_server_and_the_next_goes_on(tmp_path, part):
    broken, seen = asyncio.Event(), {}

    class Backend(FakeBackend):
        async def run(self):
            await broken.wait()
            raise BackendFailed("Rollout-0 cannot be started again: no memory")

        async def bring_back(self, tenant, failure):
            raise BackendFailed("Trainer-0 cannot be started again: no memory")

        async def sample(self, sampler, call, tenant):
            raise BackendFailed("Rollout-0 cannot be started again: no memory")

    async def first():
        backend = Backend()
        server = Server(CONFIG, backend, tmp_path)
        url = await server.start()
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            alice = Client(http, "tml-alice")
            model = await model_of(alice)
            sampler = await alice.own_sampler(model, 1)
            if part == "training":
                backend.lose_at = {len(backend.calls)}
                seen["asked"] = await alice.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            if part == "sampling":
                seen["asked"] = await alice.post("asample", sample_body(sampler, 0))
            if part == "engines":
                broken.set()
            while not server.service.trouble:
                await asyncio.sleep(0.005)
            said = (await alice.get("/api/v1/healthz", 503)).json()["error"]
            assert f"{part} ended by a fault" in said
            assert "cannot be started again: no memory" in said
            body = {"model_id": model, "seq_id": 2 if part != "training" else 3, "adam_params": {}}
            assert "no memory" in (await alice.post("optim_step", body, 503))["error"]
            if part != "engines":
                waiting = await alice.post("retrieve_future", {"request_id": seen["asked"]["request_id"]})
                assert "no memory" in waiting["queue_state_reason"]
            with pytest.raises(ServerFailed, match=f"{part} has ended: BackendFailed: .*no memory.* same name="):
                await server.serve_until(asyncio.Event())

    async def second(_, http):
        if "asked" in seen:
            assert "error" not in await Client(http, "tml-alice").result(seen["asked"])

    asyncio.run(first())
    serve(tmp_path, second, config=CONFIG)
