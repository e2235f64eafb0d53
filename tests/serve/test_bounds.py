"""Bounds on what anybody can send: bodies, heads, connections, and what a tenant has waiting."""

import asyncio
import contextlib
import gc
import json
import socket

import httpx
import pytest
import zstandard

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.conf.serve import ServeConfig, TenantConfig, hash_of
from penstock.network.listener import MAX_PENDING
from penstock.orchestrator.run_directory.run_directory import to_yaml
from penstock.serve import command
from penstock.serve.command import Server
from penstock.serve.service import Service, status
from penstock.serve.sessions import ClientFacts
from penstock.serve.tenants import OPERATOR, Tenants
from penstock.workers.protocols import Datum
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import forward_body
from tests.serve.test_server import Client, sample_body, serve

LISTS = 2**20 // 3 * b"[],"


def test_a_small_body_that_unpacks_to_a_large_one_is_refused_unread(tmp_path):
    bomb = zstandard.ZstdCompressor().compress(b'{"session_id": "x", "a": [' + 16 * LISTS + b"[]]}")
    assert len(bomb) < 4096

    async def act(_, http):
        headers = {"x-api-key": "tml-any", "content-encoding": "zstd"}
        for path in ("session_heartbeat", "forward_backward"):
            answer = await http.post(f"/api/v1/{path}", content=bomb, headers=headers)
            assert answer.status_code == 413, answer.text

    serve(tmp_path, act)


def test_only_requests_that_carry_data_may_be_large(tmp_path):
    async def act(_, http):
        client = Client(http)
        body = {"session_id": await client.session(), "model_id": "m", "sampling_session_id": "m", "seq_id": 1,
                "unknown": "x" * 2**20}  # fmt: skip
        assert "1,048,576 bytes" in (await client.post("session_heartbeat", body, 413))["error"]
        for path in ("forward", "forward_backward", "asample"):
            await client.post(path, body, 404)
            await client.post(path, body | {"unknown": "x" * 2**21}, 413)

    serve(tmp_path, act, config=ServeConfig(port=0, max_body_mib=2))


def test_a_wrong_request_takes_its_number_and_fails_in_its_turn(tmp_path):
    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        bodies = ({"adam_params": {"type": "dimuon"}}, {"adam_params": {"momentum": 1}}, {"adam_params": {}})
        told = [await client.result(await client.post("optim_step", {"model_id": model, "seq_id": seq, **body}))
                for seq, body in enumerate(bodies, 1)]  # fmt: skip
        assert "dimuon" in told[0]["error"]
        assert "momentum" in told[1]["error"]
        assert "metrics" in told[2]

    serve(tmp_path, act)


def test_a_thousand_half_requests_keep_no_client_out(tmp_path):
    async def act(_, http):
        halves = [await asyncio.open_connection("127.0.0.1", http.base_url.port) for _ in range(300)]
        for _, writer in halves:
            writer.write(b"POST /api/v1/create_session HTTP/1.1\r\n")
        for reader, writer in halves[: 300 - MAX_PENDING]:
            assert not await reader.read()
            writer.close()
        await Client(http).session()

    serve(tmp_path, act)


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/archives/1/x/run/weights/a", "/nothing"])
def test_who_has_no_key_keeps_no_connection(tmp_path, path):
    tenants = {"alice": TenantConfig(key="tml-alice")}

    async def act(_, http):
        with socket.create_connection(("127.0.0.1", http.base_url.port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            with connection.makefile("rb") as answer:
                assert b" 40" in await asyncio.to_thread(answer.read)

    serve(tmp_path, act, config=ServeConfig(port=0, tenants=tenants))


def test_who_holds_most_connections_loses_the_oldest_to_who_comes_next(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CONNECTIONS", 8)
    tenants = {"alice": TenantConfig(key="tml-alice"), "bob": TenantConfig(key="tml-bob")}
    ask = b"GET /api/v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-alice\r\n\r\n"

    async def opened(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask)
        assert b'{"sessions":[]}' in await reader.readuntil(b"}")
        return reader, writer

    async def act(_, http):
        bob = Client(http, "tml-bob")
        session = await bob.session()
        held = [await opened(http.base_url.port) for _ in range(20)]
        await bob.post("session_heartbeat", {"session_id": session})  # over the connection of before
        async with httpx.AsyncClient(base_url=http.base_url) as another:
            await Client(another, "tml-bob").post("session_heartbeat", {"session_id": session})
        async with asyncio.timeout(60):
            for reader, _ in held[:14]:
                with contextlib.suppress(ConnectionError):
                    assert not await reader.read()
        reader, writer = held[-1]
        writer.write(ask)
        assert b'{"sessions":[]}' in await reader.readuntil(b"}")
        for _, writer in held:
            writer.close()

    serve(tmp_path, act, config=ServeConfig(port=0, tenants=tenants))


def test_a_head_without_end_is_refused(tmp_path):
    async def act(_, http):
        with pytest.raises(httpx.TransportError):
            await http.get("/api/v1/healthz", headers={"x-api-key": "tml-any", "x-long": "x" * 2**18})

    serve(tmp_path, act)


def test_a_key_is_made_once_and_only_its_hash_is_kept(tmp_path):
    async def first():
        server = Server(ServeConfig(port=0), FakeBackend(), tmp_path)
        url = await server.start()
        async with httpx.AsyncClient(base_url=url) as http:
            await Client(http, server.key).session()
            assert (await http.get("/status", headers={"x-api-key": "tml-any"})).status_code == 401
        await server.drain()
        return server.key

    async def second(key):
        server = Server(ServeConfig(port=0), FakeBackend(), tmp_path)
        url = await server.start()
        async with httpx.AsyncClient(base_url=url) as http:
            await Client(http, key).session()
        await server.drain()
        return server.key

    key = asyncio.run(first())
    assert key.startswith("tml-")
    assert asyncio.run(second(key)) == ""
    assert all(key.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}])
def test_pages_of_other_sites_are_refused(tmp_path, headers):
    async def act(_, http):
        answer = await http.get("/status", headers={"x-api-key": "tml-any", **headers})
        assert (answer.status_code, "pages of other sites" in answer.text) == (403, True)
        own = {"x-api-key": "tml-any", "origin": f"http://127.0.0.1:{http.base_url.port}"}
        assert (await http.get("/status", headers=own)).status_code == 200

    serve(tmp_path, act)


def test_nothing_that_a_server_leaves_or_shows_has_a_key(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ALICE_KEY", "tml-secret-alice")
    (tmp_path / "bob").write_text("tml-secret-bob\n")
    tenants = {"alice": TenantConfig(key="env:ALICE_KEY"), "bob": TenantConfig(key=f"file:{tmp_path / 'bob'}"),
               "carol": TenantConfig(key="tml-secret-carol")}  # fmt: skip
    config = ServeConfig(port=0, tenants=tenants)
    shown = [repr(config), to_yaml(RunConfig(serve=config))]

    async def act(server, http):
        for name in tenants:
            client = Client(http, f"tml-secret-{name}")
            model = (await client.result(await client.adapter(await client.session())))["model_id"]
            await client.own_sampler(model, 1)
            shown.extend([(await client.get("/metrics")).text, (await client.get("/status")).text])
        assert (await http.get("/status", headers={"x-api-key": hash_of("tml-secret-bob")})).status_code == 401
        shown.append(json.dumps(server.status()))

    serve(tmp_path / "serve", act, config=config, key="tml-secret-operator")
    left = [file for file in (tmp_path / "serve").rglob("*") if file.is_file()]
    assert len(left) > 6
    shown += [file.read_bytes().decode(errors="replace") for file in left] + [caplog.text]
    assert not [text for text in shown if "tml-secret" in text]
    assert (tmp_path / "serve").stat().st_mode & 0o77 == 0
    secret = [file for file in left if file.suffix in (".safetensors", ".journal")]
    assert {file.stat().st_mode & 0o777 for file in secret} == {0o600}


@pytest.mark.parametrize("key", ["env:NOT_THERE", "file:/not/there", "password", "***"])
def test_a_setting_that_names_no_key_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError) as error:
        TenantConfig(key=key)
    assert "password" not in str(error.value)


@pytest.mark.parametrize("bound", [{"max_waiting": 2}, {"max_waiting_mib": 1}])
def test_a_tenant_with_too_much_waiting_is_asked_to_come_again(tmp_path, bound):
    tenants = {"alice": TenantConfig(key="tml-alice", **bound), "bob": TenantConfig(key="tml-bob")}
    seen = {}

    class Held(FakeBackend):
        async def sample(self, sampler, call, tenant):
            await seen["go"].wait()
            return await super().sample(sampler, call, tenant)

    async def act(_, http):
        seen["go"] = asyncio.Event()
        alice, bob = Client(http, "tml-alice"), Client(http, "tml-bob")
        samplers = {}
        for client in (alice, bob):
            model = (await client.result(await client.adapter(await client.session())))["model_id"]
            samplers[client] = await client.own_sampler(model, 1), model
        sampler, model = samplers[alice]
        bodies = [sample_body(sampler, seq, unknown="x" * 400_000) for seq in range(3)]
        futures = [await alice.post("asample", body) for body in bodies[:2]]
        assert await alice.post("asample", bodies[0]) == futures[0]
        answer = await http.post("/api/v1/asample", json=bodies[2], headers=alice.headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        await bob.post("asample", sample_body(samplers[bob][0], 0, unknown="x" * 400_000))
        later = {"model_id": model, "adam_params": {}, "unknown": "x" * 300_000}
        assert "max_waiting" in (await alice.post("optim_step", later | {"seq_id": 3}, 429))["error"]
        await alice.result(await alice.post("optim_step", later | {"seq_id": 2}))  # which all others wait for
        seen["go"].set()
        for future in futures:
            assert "sequences" in await alice.result(future)
        await alice.result(await alice.post("asample", bodies[2]))

    serve(tmp_path, act, Held(), ServeConfig(port=0, poll_s=0.5, tenants=tenants))


@pytest.mark.parametrize("body", [
    {"user_metadata": {"a": "x" * 2**14}}, {"display_name": "x" * 2**15}, {"base_model": "x" * 2**15},
])  # fmt: skip
def test_metadata_of_a_session_is_bounded(tmp_path, body):
    async def act(_, http):
        answer = await Client(http).post("create_session", body, 422)
        assert "user_metadata, names and paths have more than 16,384 bytes" in answer["error"]
        await Client(http).post("create_session", {}, 422, **{"x-idempotency-key": "x" * 257})

    serve(tmp_path, act)


class Held(FakeBackend):
    """Draws no sample until it `may`."""

    def __init__(self):
        super().__init__()
        self.may = asyncio.Event()

    async def sample(self, sampler, call, tenant):
        await self.may.wait()
        return await super().sample(sampler, call, tenant)


def test_requests_that_waited_before_a_start_count_after_it(tmp_path):
    config = ServeConfig(port=0, poll_s=0.5, drain_s=0, tenants={"alice": TenantConfig(key="tml-alice", max_waiting=3)})
    seen = {}

    async def first(_, http):
        client = Client(http, "tml-alice")
        session = await client.session()
        seen["model"] = (await client.result(await client.adapter(session)))["model_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "m"}
        sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
        seen["futures"] = [await client.post("asample", sample_body(sampler, seq)) for seq in range(2)]
        seen["late"] = await client.post("optim_step", {"model_id": seen["model"], "seq_id": 2, "adam_params": {}})

    async def second(server, http):
        client = Client(http, "tml-alice")
        more = {"model_id": seen["model"], "seq_id": 3, "adam_params": {}}
        assert "3 requests of this key wait" in (await client.post("optim_step", more, 429))["error"]
        server.service.backend.may.set()
        for future in seen["futures"]:
            assert "sequences" in await client.result(future)
        await client.post("optim_step", more)

    serve(tmp_path, first, Held(), config)
    serve(tmp_path, second, Held(), config)


def test_a_request_that_waits_is_not_decoded(tmp_path):
    async def act(server, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        body = {"model_id": model, "seq_id": 2, **forward_body([1, 2, 3], 1.0)}
        waiting = await client.post("forward_backward", body)
        assert server.service.clients[model].log.entries[2].tokens == 2
        assert not [one for one in datums() if id(one) not in before]
        await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert "loss:sum" in (await client.result(waiting))["metrics"]

    def datums():
        return [one for one in gc.get_objects() if isinstance(one, Datum)]

    gc.collect()
    kept = datums()  # of other tests
    before = set(map(id, kept))
    serve(tmp_path, act)


def test_adapters_that_are_made_at_the_same_time_are_counted(tmp_path):
    config = ServeConfig(port=0, tenants={"alice": TenantConfig(key="tml-alice", max_adapters=2)})

    async def act(_, http):
        client = Client(http, "tml-alice")
        session = await client.session()
        bodies = [{"session_id": session, "model_seq_id": number, "base_model": "m", "lora_config": {"rank": 2}}
                  for number in range(6)]  # fmt: skip
        answers = await asyncio.gather(
            *(http.post("/api/v1/create_model", json=body, headers=client.headers) for body in bodies)
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [403] * 4

    serve(tmp_path, act, config=config)


def test_a_server_has_so_many_tenants_as_its_metrics_may_name():
    tenants = {f"tenant-{number}": TenantConfig(key=f"tml-{number}") for number in range(257)}
    with pytest.raises(ConfigError, match="256 at most"):
        ServeConfig(tenants=tenants)


def test_a_tenant_opens_so_many_sessions_and_no_more(tmp_path):
    async def act(_, http):
        client = Client(http)
        for number in range(4):
            await client.session(str(number))
        answer = await client.post("create_session", {}, 429, **{"x-idempotency-key": "5"})
        assert "twice serve.keep_sessions" in answer["error"]
        await client.session("3")

    serve(tmp_path, act, config=ServeConfig(port=0, keep_sessions=2))


def test_the_sdk_hears_what_to_delete_and_saves_again_once_it_has(tmp_path):
    import tinker

    tenants = {"alice": TenantConfig(key="tml-alice", max_stored_gib=2048 / 2**30), "bob": TenantConfig(key="tml-bob")}

    def loop(url):
        service = tinker.ServiceClient(base_url=url, api_key="tml-alice")
        training = service.create_lora_training_client(base_model="m", rank=2)
        first = training.save_state("first").result().path
        words = rf"max_stored_gib.*delete_checkpoint_from_tinker_path, the oldest are {first}"
        with pytest.raises(tinker.RequestFailedError, match=words):
            training.save_state("second").result()
        service.create_rest_client().delete_checkpoint_from_tinker_path(first).result()
        return training.save_state("third").result().path

    async def act(_, http):
        path = await asyncio.to_thread(loop, str(http.base_url))
        assert path.endswith("/weights/third")

    serve(tmp_path, act, config=ServeConfig(port=0, poll_s=0.5, tenants=tenants))


def test_the_status_looks_at_each_session_and_run_once_whoever_has_it(tmp_path):
    seen = []

    class Watched(dict):
        def values(self):
            for value in super().values():
                seen.append(value)
                yield value

    config = ServeConfig(tenants={f"tenant-{number}": TenantConfig(key=f"tml-{number}") for number in range(20)})

    async def scenario():
        service = Service(config, FakeBackend(), tmp_path, Tenants(config))
        sessions = service.sessions
        for name in config.tenants:
            session = await sessions.create(name, "", 1.0)
            await sessions.add_client(ClientFacts(f"{session.id}:train:0", session.id, name, "m", 0.0))
        sessions.sessions, sessions.facts = Watched(sessions.sessions), Watched(sessions.facts)
        shown = status(service, OPERATOR)["tenants"]
        await sessions.close()
        assert [len(one["sessions"]) for one in shown.values()] == [1] * 20

    asyncio.run(scenario())
    assert len(seen) == 40
