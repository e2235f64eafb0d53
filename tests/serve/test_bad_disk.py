"""A disk that refuses costs time, and nobody but the client whose files it refuses. A fault ends the server loudly."""

import asyncio
import json
import os
from collections import Counter

import httpx
import pytest

from penstock.conf.serve import ServeConfig
from penstock.serve import samples, training_clients
from penstock.serve.command import Server, ServerFailed
from penstock.serve.journal import JournalDamaged, JournalError
from penstock.serve.service import Service
from penstock.serve.tenants import Schedule, Tenants
from tests.serve.bad_disk import ERRORS, refusing
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import ScriptedClient, forward_body
from tests.serve.test_server import Client, sample_body, serve

GOOD = ("forward_backward", forward_body([1, 2, 3], 1.0))
STEP = ("optim_step", {"adam_params": {"learning_rate": 0.1}})
BRIEF = ServeConfig(port=0, poll_s=0.1, gap_s=0.2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(training_clients, "DISK_PAUSE_S", 0.01)
    monkeypatch.setattr(training_clients, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(training_clients, "LOOK_S", 0.01)
    monkeypatch.setattr(samples, "LOOK_S", 0.01)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_the_others_train_on_while_one_client_cannot_write(tmp_path):
    async def scenario():
        service = Service(BRIEF, FakeBackend(), tmp_path, Tenants(BRIEF))
        await service.open()
        full = asyncio.Event()
        full.set()
        stuck, other = ScriptedClient(0, [GOOD, STEP]), ScriptedClient(1, [GOOD, STEP] * 5)

        def refuses(_, file):
            return full.is_set() and "_train_0/results" in file and stuck.model_id in service.clients

        with refusing(tmp_path, refuses):
            waiting = asyncio.ensure_future(stuck.run(service))
            await asyncio.wait_for(other.run(service), 60)
            client = service.clients[stuck.model_id]
            assert "results.journal" in service.waits_for(client, client.next)
            assert service.trouble == ""
            full.clear()
            await asyncio.wait_for(waiting, 60)
        assert service.waits_for(client, None).startswith("0 requests")
        assert sorted(stuck.answers) == [0, 1, 2]
        await service.close()

    asyncio.run(scenario())


def test_a_gap_is_closed_once_the_disk_takes_it(tmp_path):
    full = asyncio.Event()

    async def act(server, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        future = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        full.set()
        training_clients = server.service.clients[model]
        await until(lambda: training_clients.trouble)
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
        full.clear()
        assert "request 1 did not come" in (await client.result(future))["error"]

    with refusing(tmp_path, lambda _, file: full.is_set() and "results" in file):
        serve(tmp_path, act, config=BRIEF)


def test_a_sample_whose_result_cannot_be_written_is_drawn_again(tmp_path):
    refused, servers = [], []

    async def act(server, http):
        servers.append(server)
        client = Client(http)
        made = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "m"}
        sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
        futures = [await client.post("asample", sample_body(sampler, seq)) for seq in range(4)]
        assert all(["sequences" in await client.result(future) for future in futures])

    def refuses(_, file):
        is_due = "results" in file and len(refused) < 9 and bool(servers and servers[0].service.samples.logs)
        refused.extend([file] * is_due)
        return is_due

    with refusing(tmp_path, refuses):
        serve(tmp_path, act, config=BRIEF)
    assert len(refused) == 9


def test_a_sample_whose_weights_the_disk_refuses_is_drawn_once_there_is_room(tmp_path):
    refused = []

    class Backend(FakeBackend):
        async def publish(self, sampler, state):
            if len(refused) < len(ERRORS):
                refused.append(ERRORS[len(refused)])
                raise OSError(refused[-1], os.strerror(refused[-1]))
            await super().publish(sampler, state)

    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        sampler = await client.own_sampler(model, 1)
        assert "sequences" in await client.result(await client.post("asample", sample_body(sampler, 0)))

    serve(tmp_path, act, Backend(), BRIEF)
    assert refused == list(ERRORS)


def test_whoever_waits_hears_that_the_request_is_damaged(tmp_path, monkeypatch):
    async def act(_, http):
        client, session = Client(http), await Client(http).session()
        model = (await client.result(await client.adapter(session)))["model_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "m"}
        sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "pick", lambda *_: None)
            futures = [
                await client.post("asample", sample_body(sampler, 0)),
                await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
            ]
            for journal in tmp_path.glob("*/*/requests.journal"):
                journal.write_bytes(journal.read_bytes().replace(b'_id":', b'_iD":'))
        for future in futures:
            assert "is not what was written" in (await client.result(future))["error"]
        good = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        assert "metrics" in await client.result(good)

    serve(tmp_path, act, config=BRIEF)


def test_weights_are_saved_once_there_is_room(tmp_path):
    asked = Counter()

    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        future = await client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "kept"})
        assert (await client.result(future))["path"].endswith("/weights/kept")
        await client.own_sampler(model, 2)

    def refuses(_, file):
        kind = next((kind for kind in ("checkpoints", "weights-") if kind in file), "")
        asked[kind] += 1
        return kind != "" and asked[kind] <= 3

    with refusing(tmp_path, refuses):
        serve(tmp_path, act, config=BRIEF)
    assert all(asked[kind] > 3 for kind in ("checkpoints", "weights-"))


def broken(*_):
    raise ZeroDivisionError("a fault")


@pytest.mark.parametrize("loop", ["training", "sampling"])
def test_a_fault_of_a_loop_ends_the_server_and_the_next_one_goes_on(tmp_path, monkeypatch, loop):
    seen = {}

    async def first():
        server = Server(BRIEF, FakeBackend(), tmp_path, "tml-any")
        url = await server.start()
        serving = asyncio.create_task(server.serve_until(asyncio.Event()))
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            client = Client(http)
            model = (await client.result(await client.adapter(await client.session())))["model_id"]
            sampler = await client.own_sampler(model, 1)
            monkeypatch.setattr(Schedule, "pick", broken)
            if loop == "training":
                asked = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            else:
                asked = await client.post("asample", sample_body(sampler, 0))
            with pytest.raises(ServerFailed, match=f"{loop} has ended: ZeroDivisionError: a fault.*same name="):
                await serving
            seen["asked"] = asked

    asyncio.run(first())
    monkeypatch.undo()

    async def second(_, http):
        assert "error" not in await Client(http).result(seen["asked"])

    serve(tmp_path, second, config=BRIEF)


def test_a_server_whose_loop_has_ended_is_not_healthy(tmp_path, monkeypatch):
    async def act(server, http):
        client = Client(http)
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
        monkeypatch.setattr(Schedule, "pick", broken)
        await client.adapter(await client.session())
        await until(lambda: server.service.trouble)
        assert "training ended by a fault" in (await client.get("/api/v1/healthz", 503)).json()["error"]

    serve(tmp_path, act, config=BRIEF)


def test_damaged_files_of_one_client_are_refused_and_the_others_go_on(tmp_path):
    script = [GOOD, STEP, GOOD, STEP]

    async def life(clients):
        service = Service(BRIEF, FakeBackend(), tmp_path, Tenants(BRIEF))
        await service.open()
        try:
            for client in clients:
                await asyncio.wait_for(client.run(service), 60)
        finally:
            await service.close()

    hurt, other = ScriptedClient(0, script), ScriptedClient(1, list(script))
    asyncio.run(life([hurt, other]))
    (journal,) = tmp_path.glob("clients/*_train_0/results.journal")
    data = journal.read_bytes()
    journal.write_bytes(data[:20] + b"\0" + data[21:])
    damaged = journal.read_bytes()
    other.script.append(STEP)
    asyncio.run(life([other]))
    with pytest.raises(JournalDamaged, match="the record at byte 0 is damaged"):
        asyncio.run(life([hurt]))
    assert journal.read_bytes() == damaged
    journal.write_bytes(data)
    asyncio.run(life([hurt]))


def test_a_request_that_was_refused_is_not_carried_out_in_place_of_the_next(tmp_path):
    async def scenario():
        service = Service(BRIEF, FakeBackend(), tmp_path, Tenants(BRIEF))
        await service.open()
        client = ScriptedClient(0, [])
        training_clients = await client.run(service)
        body = {"seq_id": 1, "model_id": client.model_id}
        with refusing(tmp_path, lambda _, file: "requests" in file), pytest.raises(JournalError):
            await client.send(service, training_clients, 1, "optim_step", json.dumps(STEP[1] | body).encode())
        entry = await client.send(service, training_clients, 1, "forward_backward", json.dumps(GOOD[1] | body).encode())
        await entry.is_done.wait()
        assert b"grad_norm" not in training_clients.log.answer_of(entry).body
        await service.close()

    asyncio.run(scenario())
