"""The end of a server by a signal takes a bounded time, whatever hangs: what was acknowledged is on the disk before."""

import asyncio

from penstock.conf.serve import ServeConfig
from penstock.serve.command import CLOSE_S, FLEET_S, GRACE_S, Server
from penstock.serve.service import Service
from penstock.serve.tenants import Tenants
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import ScriptedClient, forward_body
from tests.virtual_time import run_virtually


def test_the_parts_of_the_end_take_fifteen_seconds_at_most():
    assert ServeConfig().drain_s + CLOSE_S + 1.5 * GRACE_S + FLEET_S < 15


def test_an_end_waits_for_nothing_that_hangs(tmp_path):
    class Hung(FakeBackend):
        async def called(self, what, act):
            return await (asyncio.Event().wait() if what[0] == "forward" else super().called(what, act))

        async def sample(self, sampler, call, tenant):
            await asyncio.Event().wait()

    async def scenario():
        config, loop = ServeConfig(), asyncio.get_running_loop()
        server = Server(config, Hung(), tmp_path)
        service = server.service = Service(config, Hung(), tmp_path, Tenants(config))
        await service.open()
        client = ScriptedClient(0, [("forward_backward", forward_body([1, 2, 3], 1.0))])
        working = asyncio.create_task(client.run(service))
        while not (service.ranks.current and service.clients[client.model_id].next_seq == 1):
            await asyncio.sleep(0.01)
        started = loop.time()
        await server.drain()
        assert loop.time() - started <= config.drain_s + CLOSE_S
        working.cancel()

    run_virtually(scenario())
