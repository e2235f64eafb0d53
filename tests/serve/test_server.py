"""The server over HTTP, as plain requests: keys, limits, isolation, repeated creation, restarts, gaps, deletions."""

import asyncio
import itertools
import json
import re
from dataclasses import replace

import httpx
import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.serve import ServeConfig, TenantConfig
from penstock.metering.table import METRICS
from penstock.serve import samples, service
from penstock.serve.command import Server
from penstock.serve.sdk_messages import PROTOBUF, messages
from penstock.workers.protocols import WHOLE
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import forward_body

MOST_OF_TENANT = 26
"""Most series of a tenant."""


class Client:
    """Requests with one key. `post` returns what was answered; `result` polls until it is there."""

    def __init__(self, http, key="tml-any"):
        self.http, self.headers = http, {"x-api-key": key}

    async def post(self, path, body, status=200, **headers):
        answer = await self.http.post(f"/api/v1/{path}", json=body, headers={**self.headers, **headers})
        assert answer.status_code == status, answer.text
        is_message = answer.headers.get("content-type") == PROTOBUF
        return result_of(answer.content) if is_message else answer.json() if answer.content else None

    async def get(self, path, status=200):
        answer = await self.http.get(path, headers=self.headers)
        assert answer.status_code == status, answer.text
        return answer

    async def result(self, future):
        for _ in range(600):
            answer = await self.post("retrieve_future", {"request_id": future["request_id"]})
            if answer.get("type") != "try_again":
                return answer
        raise AssertionError("no result")

    async def session(self, key="k"):
        return (await self.post("create_session", {"tags": []}, **{"x-idempotency-key": key}))["session_id"]

    async def adapter(self, session, number=0, status=200):
        body = {"session_id": session, "model_seq_id": number, "base_model": "m", "lora_config": {"rank": 2}}
        return await self.post("create_model", body, status)

    async def own_sampler(self, model, seq, number=0):
        future = await self.post("save_weights_for_sampler", {
            "model_id": model, "seq_id": seq, "sampling_session_seq_id": number})  # fmt: skip
        return (await self.result(future))["sampling_session_id"]


def result_of(body):
    """A result in protobuf, as plain data."""
    pb = messages()
    if b"ArrayRecord" in body:
        return {"metrics": dict(pb.ForwardBackwardOutput.FromString(body).metrics)}
    samples = pb.SampleResponse.FromString(body).sequences
    return {"sequences": [{"tokens": list(one.tokens), "logprobs": list(one.logprobs)} for one in samples]}


def sample_body(sampler, seq, **more):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "num_samples": 1,
            "sampling_params": {"max_tokens": 4}, **more}  # fmt: skip


def serve(directory, act, backend=None, config=None, key=""):
    """One life of a server, ended in order."""

    async def life():
        settings = config or ServeConfig(port=0, poll_s=0.5)
        server = Server(settings, backend or FakeBackend(), directory, key or "tml-any")
        url = await server.start()
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                return await act(server, http)
        finally:
            await server.drain()

    return asyncio.run(life())


def test_who_has_no_key_is_not_parsed_and_a_large_body_is_refused(tmp_path):
    tenants = {"alice": TenantConfig(key="tml-alice")}

    async def act(_, http):
        garbage = await http.post("/api/v1/forward_backward", content=b"\xff", headers={"x-api-key": "tml-eve"})
        assert garbage.status_code == 401
        assert "TINKER_API_KEY" in garbage.json()["error"]
        operator = await http.post("/api/v1/create_session", json={}, headers={"x-api-key": "tml-operator"})
        assert operator.status_code == 403
        large = await http.post("/api/v1/telemetry", content=bytes(2**20 + 1), headers={"x-api-key": "tml-alice"})
        assert large.status_code == 413
        assert (await http.get("/metrics", headers={"x-api-key": "tml-operator"})).status_code == 200
        assert (await http.get("/metrics")).status_code == 401

    serve(tmp_path, act, config=ServeConfig(port=0, max_body_mib=1, tenants=tenants), key="tml-operator")


def test_tenants_see_nothing_of_each_other(tmp_path):
    tenants = {"alice": TenantConfig(key="tml-alice", max_adapters=1), "bob": TenantConfig(key="tml-bob")}

    async def act(server, http):
        alice, bob = Client(http, "tml-alice"), Client(http, "tml-bob")
        session = await alice.session()
        model = (await alice.result(await alice.adapter(session)))["model_id"]
        sampler = await alice.own_sampler(model, 1)
        future = await alice.post("save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})
        path = (await alice.result(future))["path"]
        assert await bob.session() != session
        own = await bob.session()
        for name, body in {
            "session_heartbeat": {"session_id": session}, "get_info": {"model_id": model},
            "optim_step": {"model_id": model, "seq_id": 3, "adam_params": {}}, "asample": sample_body(sampler, 0),
            "retrieve_future": {"request_id": f"{model}:1"}, "weights_info": {"tinker_path": path},
            "create_sampling_session": {"session_id": own, "sampling_session_seq_id": 0, "model_path": path},
            "load_weights": {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True},
        }.items():  # fmt: skip
            await bob.post(name, body, 404)
        mine = (await bob.result(await bob.adapter(own)))["model_id"]
        stolen = await bob.result(await bob.post(
            "load_weights", {"model_id": mine, "seq_id": 1, "path": path, "optimizer": False}))  # fmt: skip
        assert "there is no such checkpoint" in stolen["error"]
        assert (await bob.get("/api/v1/checkpoints")).json()["checkpoints"] == []
        assert [one["training_run_id"] for one in (await bob.get("/api/v1/training_runs")).json()["training_runs"]] == [
            mine
        ]
        metrics = (await bob.get("/metrics")).text
        assert 'tenant="bob"' in metrics
        assert "alice" not in metrics
        refused = await alice.adapter(session, 1, 403)
        assert "max_adapters" in refused["error"]
        assert set((await bob.get("/status")).json()["tenants"]) == {"bob"}
        assert set(server.status()["tenants"]) == {"alice", "bob"}

    serve(tmp_path, act, config=ServeConfig(port=0, poll_s=0.5, tenants=tenants))


def test_samples_do_not_depend_on_how_often_the_sdk_has_asked_for_their_session(tmp_path):
    """The SDK counts sampling sessions anew at every retry, so their numbers are no part of seeds."""

    async def drawn(client, key, numbers):
        session = await client.session(key)
        model = (await client.result(await client.adapter(session)))["model_id"]
        samplers = [await client.own_sampler(model, seq, number) for seq, number in enumerate(numbers[:2], 1)]
        for number in numbers[2:]:
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "m"}
            samplers.append((await client.post("create_sampling_session", body))["sampling_session_id"])
        bodies = [sample_body(sampler, 0, num_samples=8) for sampler in samplers]
        answers = [await client.result(await client.post("asample", body)) for body in bodies]
        return [[one["tokens"] for one in answer["sequences"]] for answer in answers]

    async def act(_, http):
        one, other = await drawn(Client(http), "a", (0, 1, 2, 3)), await drawn(Client(http), "b", (0, 6, 7, 9))
        assert one == other
        assert all(first != second for first, second in itertools.combinations(one, 2))

    serve(tmp_path, act)


def test_a_whole_model_has_one_client_at_a_time(tmp_path, monkeypatch):
    backend = FakeBackend()
    backend.facts = replace(backend.facts, max_rank=WHOLE)

    async def act(_, http):
        client = Client(http)
        first, second = await client.session("a"), await client.session("b")
        model = (await client.result(await client.adapter(first)))["model_id"]
        info = await client.post("get_info", {"model_id": model})
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        refusal = await client.adapter(second, status=403)
        assert "one client trains all weights at a time" in refusal["error"]
        with monkeypatch.context() as patch:
            patch.setattr(service, "SILENT_S", 0.0)  # the first has fallen silent
            assert (await client.result(await client.adapter(second)))["model_id"] != model
        await client.adapter(first, number=1, status=403)

    serve(tmp_path, act, backend)


def test_a_save_that_comes_again_with_the_next_sampling_number_is_the_same(tmp_path):
    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        first = await client.post("save_weights_for_sampler", body)
        assert await client.post("save_weights_for_sampler", body | {"sampling_session_seq_id": 1}) == first
        assert (await client.result(first))["sampling_session_id"].endswith(":sample:0")
        other = await client.post("save_weights_for_sampler", body | {"path": "named"}, 422)
        assert "taken before with other content" in other["error"]

    serve(tmp_path, act)


def test_what_was_made_goes_on_in_the_next_server(tmp_path):
    backend, seen = FakeBackend(), {}

    async def first(_, http):
        client = Client(http)
        seen["session"] = await client.session()
        assert await client.session() == seen["session"]
        model = seen["model"] = (await client.result(await client.adapter(seen["session"])))["model_id"]
        assert (await client.adapter(seen["session"]))["request_id"] == f"{model}:0"
        seen["sampler"] = await client.own_sampler(model, 1)
        seen["future"] = await client.post("asample", sample_body(seen["sampler"], 0))
        seen["sample"] = await client.result(seen["future"])
        assert (await client.post("asample", sample_body(seen["sampler"], 0))) == seen["future"]
        other = await client.post("asample", sample_body(seen["sampler"], 0, num_samples=2), 422)
        assert "taken before with other content" in other["error"]

    async def second(_, http):
        client = Client(http)
        assert await client.session() == seen["session"]
        assert await client.result(seen["future"]) == seen["sample"]
        again = await client.post(
            "asample", sample_body(seen["sampler"], 1, sampling_params={"max_tokens": 4, "seed": 5})
        )
        assert len((await client.result(again))["sequences"][0]["tokens"]) == 4 * 4
        assert (await client.post("get_info", {"model_id": seen["model"]}))["lora_rank"] == 2
        assert (await client.get(f"/api/v1/training_runs/{seen['model']}")).json()["lora_rank"] == 2
        future = await client.post("optim_step", {"model_id": seen["model"], "seq_id": 2, "adam_params": {}})
        assert (await client.result(future))["metrics"] == {"grad_norm": 0.0}
        joined = [await client.post("join_sampling_session", {"sampling_session_id": seen["sampler"]}) for _ in "ab"]
        assert [one["client_counter"] for one in joined] == [1, 2]

    serve(tmp_path, first, backend)
    serve(tmp_path, second, FakeBackend())


def test_unnamed_weights_and_adapters_go_with_their_session(tmp_path):
    backend = FakeBackend()

    async def act(server, http):
        client = Client(http)
        session = await client.session()
        model = (await client.result(await client.adapter(session)))["model_id"]
        sampler = await client.own_sampler(model, 1)
        await client.result(await client.post("asample", sample_body(sampler, 0)))
        assert len(backend.samplers) == 1
        await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, 204)
        assert backend.samplers == {}
        assert backend.adapters == {}
        await client.post("asample", sample_body(sampler, 1), 404)
        await client.post("session_heartbeat", {"session_id": session}, 410)
        await client.post("forward", {"model_id": model, "seq_id": 2}, 404)
        assert not list(tmp_path.glob("samples/*"))
        assert not list(tmp_path.glob("clients/*"))

    serve(tmp_path, act, backend)


def test_the_newest_unnamed_weights_are_kept_and_those_that_requests_wait_for(tmp_path, monkeypatch):
    backend = FakeBackend()

    async def act(server, http):
        client = Client(http)
        session = await client.session()
        model = (await client.result(await client.adapter(session)))["model_id"]
        samplers = [await client.own_sampler(model, number + 1, number) for number in range(4)]
        assert len(list(tmp_path.glob("samples/*/weights*"))) == 2
        old, new = [await client.result(await client.post("asample", sample_body(samplers[number], 0)))
                    for number in (1, 2)]  # fmt: skip
        assert "keeps the newest 2 (serve.keep_unnamed)" in old["error"]
        assert "sequences" in new
        monkeypatch.setattr(samples.SamplingQueue, "is_idle", lambda _, queue: queue != samplers[2])
        samplers += [await client.own_sampler(model, number + 1, number) for number in (4, 5)]
        assert len(list(tmp_path.glob("samples/*/weights*"))) == 3

    serve(tmp_path, act, backend, ServeConfig(port=0, poll_s=0.5, keep_unnamed=2))


def test_a_checkpoint_whose_time_is_over_leaves_the_disk_and_the_engines(tmp_path):
    backend = FakeBackend()

    async def act(_, http):
        client = Client(http)
        session = await client.session()
        model = (await client.result(await client.adapter(session)))["model_id"]
        body = {"model_id": model, "seq_id": 1, "path": "brief", "ttl_seconds": 3600}
        saved = await client.result(await client.post("save_weights_for_sampler", body))
        made = await client.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 1, "model_path": saved["path"]})  # fmt: skip
        await client.result(await client.post("asample", sample_body(made["sampling_session_id"], 0)))
        assert len(backend.samplers) == 1
        (facts,) = tmp_path.glob("checkpoints/*/*/*/checkpoint.json")
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "expires": 1.0}))
        while backend.samplers or list(tmp_path.glob("checkpoints/*/*/*")):
            await asyncio.sleep(0.02)

    serve(tmp_path, act, backend, ServeConfig(port=0, poll_s=0.5, session_timeout_s=4))


def test_a_session_without_heartbeats_rests_and_comes_back(tmp_path):
    backend = FakeBackend()

    async def act(_, http):
        client = Client(http)
        session = await client.session()
        model = (await client.result(await client.adapter(session)))["model_id"]
        sampler = await client.own_sampler(model, 1)
        while backend.adapters or list(tmp_path.glob("samples/*/weights*")):
            await asyncio.sleep(0.02)
        await client.post("session_heartbeat", {"session_id": session})
        gone = await client.result(await client.post("asample", sample_body(sampler, 0)))
        assert "unnamed weights" in gone["error"]
        assert gone["category"] == "user"
        future = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        assert "metrics" in await client.result(future)

    serve(tmp_path, act, backend, ServeConfig(port=0, poll_s=0.5, session_timeout_s=0.3))


def test_a_request_that_never_comes_is_named_and_given_up(tmp_path):
    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        future = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        waiting = await client.post("retrieve_future", {"request_id": future["request_id"]})
        assert "request 1 has not come; given up in" in waiting["queue_state_reason"]
        assert "request 1 did not come within 2 s" in (await client.result(future))["error"]
        late = {"model_id": model, "seq_id": 1, "adam_params": {}}
        assert "comes too late" in (await client.post("optim_step", late, 422))["error"]
        after = await client.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
        assert "metrics" in await client.result(after)

    serve(tmp_path, act, config=ServeConfig(port=0, poll_s=0.1, gap_s=2.0))


def test_protobuf_and_json_ask_for_the_same_and_are_told_the_same(tmp_path):
    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        plain = forward_body([1, 2, 3], 0.5) | {"model_id": model, "seq_id": 1}
        told = await client.result(await client.post("forward_backward", plain))
        pb = messages()
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=2, loss_fn="cross_entropy", forward_only=True)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0\2\0\0\0"
        datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(
            sparse_csr=pb.SparseCsr(values=b"\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", crow_indices=bytes(8) + b"\1" + bytes(7)
                                    + b"\2" + bytes(7), col_indices=bytes(16)),
            dtype=pb.DTYPE_INT64, shape=[2, 1]))  # fmt: skip
        half = pb.Tensor(dense=b"\0\0\0\x3f" * 2, dtype=pb.DTYPE_FLOAT32, shape=[2, 1])
        datum.loss_fn_inputs["weights"].CopyFrom(half)
        headers = {**client.headers, "content-type": PROTOBUF}
        answer = await http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
        future = answer.json()
        await client.result(future)
        answer = await http.post(
            "/api/v1/retrieve_future", json={"request_id": future["request_id"]}, headers=client.headers
        )
        output = pb.ForwardBackwardOutput.FromString(answer.content)
        assert dict(output.metrics) == told["metrics"]
        field = output.loss_fn_outputs[0].fields["logprobs"]
        assert list(field.trailing_shape) == [1]
        assert len(field.data) == 8

    serve(tmp_path, act)


@pytest.mark.parametrize(
    ("path", "words"),
    [("create_custom_loss", "run in the client"), ("copy_weights", "not copied"), ("auth/token", "no token"),
     ("sessions/search", "not searched"), ("training_runs/a/checkpoints/weights/b/publish", "not published")],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(tmp_path, path, words):
    async def act(_, http):
        assert words in (await Client(http).post(path, {}, 422))["error"]

    serve(tmp_path, act)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"), ({"record_stability_info": True}, "stable_reinforce"),
     ({"sampling_params": {"min_p": 0.1}}, "min_p"), ({"prompt": {"chunks": [{"type": "image"}]}}, "chunk of image")],
)  # fmt: skip
def test_sampling_options_that_no_engine_has_are_refused_by_name(tmp_path, more, words):
    async def act(_, http):
        client = Client(http)
        made = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "m"}
        sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
        answer = await client.result(await client.post("asample", sample_body(sampler, 0) | more))
        assert words in answer["error"]
        assert answer["category"] == "user"

    serve(tmp_path, act)


def test_samples_are_cancelled_under_way_or_waiting_and_stay_so(tmp_path):
    config, seen = ServeConfig(port=0, poll_s=0.5, max_sampling=1), {}

    class Held(FakeBackend):
        async def sample(self, sampler, call, tenant):
            seen.setdefault("asked", []).append(call.num_samples)
            if call.num_samples == 2:
                seen["is_drawing"].set()
                await asyncio.Event().wait()
            return await super().sample(sampler, call, tenant)

    async def act(_, http):
        client, seen["is_drawing"] = Client(http), asyncio.Event()
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        sampler = await client.own_sampler(model, 1)
        asked = [
            await client.post("asample", sample_body(sampler, seq, num_samples=n)) for seq, n in enumerate([2, 3, 4])
        ]
        await asyncio.wait_for(seen["is_drawing"].wait(), 30)
        for future in (asked[1], asked[0], asked[0]):  # one that waits, the one under way, one that has ended
            await client.post("cancel_future", {"request_id": future["request_id"]}, 204)
        seen["futures"] = asked
        seen["answers"] = [await client.result(future) for future in asked]
        assert [one.get("error") for one in seen["answers"]] == ["the request was cancelled."] * 2 + [None]
        await client.post("cancel_future", {"request_id": asked[2]["request_id"]}, 204)
        trained = await client.post("cancel_future", {"request_id": f"{model}:1"}, 422)
        assert "the ones after it count on it" in trained["error"]

    async def again(_, http):
        client = Client(http)
        assert [await client.result(future) for future in seen["futures"]] == seen["answers"]
        assert seen["asked"] == [2, 4]

    serve(tmp_path, act, Held(), config)
    serve(tmp_path, again, Held(), config)


def test_two_servers_do_not_share_a_port(tmp_path):
    async def act(server, http):
        with pytest.raises(ConfigError, match="Choose another"):
            await Server(ServeConfig(port=http.base_url.port), FakeBackend(), tmp_path / "other").start()

    serve(tmp_path, act)


def test_metrics_count_what_a_tenant_has_used(tmp_path):
    async def act(_, http):
        client = Client(http)
        model = (await client.result(await client.adapter(await client.session())))["model_id"]
        body = forward_body([1, 2, 3], 0.5) | {"model_id": model, "seq_id": 1}
        await client.result(await client.post("forward_backward", body))
        text = (await client.get("/metrics")).text
        assert 'penstock_serve_requests_total{tenant="default",kind="forward_backward"} 1' in text
        assert 'penstock_serve_tokens_trained_total{tenant="default"} 2' in text
        assert 'penstock_serve_wait_seconds_count{tenant="default",place="ranks"} 2' in text
        found = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
        assert found == {metric.name for metric in METRICS["serve"]}
        assert text.count("\n") - len(found) <= MOST_OF_TENANT
        assert json.dumps((await client.get("/status")).json())

    serve(tmp_path, act)
