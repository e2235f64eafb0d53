"""What a server knows of its clients stays small, however many there were, and is the same after a start."""

import asyncio
import os

import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.serve import ServeConfig
from penstock.serve import sessions as module
from penstock.serve.journal import Journal, JournalDamaged
from penstock.serve.service import Service
from penstock.serve.sessions import ClientFacts, Sampler, Sessions
from penstock.serve.tenants import ONLY, Tenants
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import ScriptedClient, forward_body
from tests.serve.test_server import Client, sample_body, serve

CONFIG = ServeConfig(port=0, poll_s=0.1, keep_sessions=3)


def known(sessions):
    return sessions.sessions, sessions.facts, sessions.open_clients, +sessions.uses


@pytest.mark.parametrize("num", [40, 400])
def test_finished_sessions_leave_memory_and_disk(tmp_path, monkeypatch, num):
    monkeypatch.setattr(module, "LARGE_BYTES", 4096)
    sizes = []

    async def scenario():
        sessions = Sessions(tmp_path, 0.0, keep=3)
        for number in range(num):
            session = await sessions.create("alice", f"key-{number}", float(number))
            await sessions.add_client(ClientFacts(f"{session.id}:train:0", session.id, "alice", "m", 0.0))
            await sessions.add_sampler(Sampler(f"{session.id}:sample:0", session.id, "", is_own=False))
            await sessions.finish(session)
            for old in sessions.sessions_to_forget(0.0):
                await sessions.forget(old, [])
            await sessions.compact()
            sizes.append((tmp_path / "sessions.journal").stat().st_size)
        assert [one.key for one in sessions.sessions.values()] == [f"key-{number}" for number in range(num - 3, num)]
        assert len(sessions.facts) == 3
        await sessions.close()
        return known(sessions)

    before = asyncio.run(scenario())
    assert max(sizes) < 3 * 4096
    after = known(Sessions(tmp_path, 0.0, keep=3))
    for session in (*before[0].values(), *after[0].values()):
        session.last_seen = 0.0
    assert after == before


def test_what_is_made_while_the_journal_is_made_small_is_known_after_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 0)

    async def scenario():
        sessions, made = Sessions(tmp_path, 0.0, keep=99), []
        for number in range(20):
            creating = [asyncio.create_task(sessions.create("alice", f"{number}-{key}", 0.0)) for key in "abc"]
            await asyncio.gather(sessions.compact(), *creating)
            made += [task.result().id for task in creating]
        await sessions.close()
        return made

    made = asyncio.run(scenario())
    assert set(made) == set(Sessions(tmp_path, 0.0, keep=99).sessions)


def test_events_that_come_while_their_session_ends_keep_no_server_from_starting(tmp_path):
    async def scenario():
        sessions = Sessions(tmp_path, 0.0, keep=3)
        session = await sessions.create("alice", "a", 0.0)
        samplers = [Sampler(f"{session.id}:sample:{number}", session.id, "", is_own=False) for number in range(3)]
        for sampler in samplers[:2]:
            (await sessions.add_sampler(sampler)).is_gone = True
        await asyncio.gather(
            sessions.finish(session), sessions.join(samplers[0]), sessions.forget_deleted_samplers(session, 1),
            sessions.add_sampler(samplers[2]),
        )  # fmt: skip
        await sessions.close()
        return session

    session = asyncio.run(scenario())
    assert Sessions(tmp_path, session.last_seen, keep=3).sessions == {session.id: session}


def test_the_end_of_a_session_rewrites_no_file(tmp_path, monkeypatch):
    async def act(_, http):
        client = Client(http)
        names = [await client.session(str(number)) for number in range(4)]
        monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
        for name in names:
            await client.post(f"sessions/{name}/finish", {"reason": {"type": "success"}}, 204)
        monkeypatch.undo()

    serve(tmp_path, act)


def test_of_a_forgotten_session_the_training_runs_with_checkpoints_stay(tmp_path):
    async def scenario():
        service = Service(CONFIG, FakeBackend(), tmp_path, Tenants(CONFIG))
        await service.open()
        saved = ScriptedClient(0, [("save_weights", {"path": "kept"})])
        unsaved = ScriptedClient(1, [("forward_backward", forward_body([1, 2], 1.0))])
        for client in (saved, unsaved):
            await client.run(service)
        (session,) = service.sessions.sessions.values()
        await service.finish(session)
        for number in range(5):
            await service.sessions.create(ONLY, str(number), 10.0 + number)
        await service.tidy()
        assert session.id not in service.sessions.sessions
        assert list(service.sessions.facts) == [saved.model_id]
        await service.close()
        return saved.model_id

    run = asyncio.run(scenario())
    sessions = Sessions(tmp_path, 0.0, keep=3)
    assert sessions.run(ONLY, run).model_id == run
    assert not sessions.open_clients


def test_results_of_a_session_that_has_rested_are_told_and_more_are_drawn(tmp_path):
    async def act(server, http):
        client = Client(http)
        made = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "m"}
        sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
        future = await client.post("asample", sample_body(sampler, 0))
        told = await client.result(future)
        while server.service.samples.logs:
            await asyncio.sleep(0.01)
        assert await client.result(future) == told
        while server.service.samples.logs:
            await asyncio.sleep(0.01)
        assert "sequences" in await client.result(await client.post("asample", sample_body(sampler, 1)))

    serve(tmp_path, act, config=ServeConfig(port=0, poll_s=0.1, session_timeout_s=0.2))


def test_who_lives_or_trains_is_never_forgotten(tmp_path):
    async def scenario():
        sessions = Sessions(tmp_path, 0.0, keep=2)
        trains, lives, silent, ended = [await sessions.create("alice", name, 10.0) for name in "abcd"]
        await sessions.add_client(ClientFacts(f"{trains.id}:train:0", trains.id, "alice", "m", 0.0))
        await sessions.create("bob", "a", 10.0)
        lives.last_seen = 90.0
        await sessions.finish(ended)
        assert sessions.sessions_to_forget(50.0) == [ended, silent]
        await sessions.close()

    asyncio.run(scenario())


def test_deleted_unnamed_weights_are_forgotten_and_later_seeds_are_new(tmp_path):
    async def scenario():
        sessions = Sessions(tmp_path, 0.0, keep=3)
        session = await sessions.create("alice", "a", 0.0)
        for number in range(6):
            own = Sampler(f"{session.id}:sample:{number}", session.id, "run", number % 2 == 0, origin=f"0/{number}/own")
            own.origin *= own.is_own
            added = await sessions.add_sampler(own)
            added.is_gone = own.is_own
        origins = {sampler.origin for sampler in session.samplers.values()}
        await sessions.forget_deleted_samplers(session, 2)
        assert [sampler.number for sampler in session.samplers.values()] == [1, 3, 4, 5]
        later = await sessions.add_sampler(Sampler(f"{session.id}:sample:9", session.id, "run", is_own=False))
        assert later.origin not in origins
        await sessions.close()
        return known(sessions)[0][session.id].samplers

    samplers = asyncio.run(scenario())
    (session,) = Sessions(tmp_path, 0.0, keep=3).sessions.values()
    assert list(session.samplers) == list(samplers)


@pytest.mark.parametrize("version", [{}, {"format": 2}, {"format": 3}])
def test_a_directory_of_the_version_before_is_read_and_of_a_newer_one_refused(tmp_path, version):
    async def write():
        journal = Journal(tmp_path / "sessions.journal")
        session = {"id": "a", "tenant": "alice", "created": 0.0, "key": "k", "metadata": None, "display_name": None}
        sampler = {"session_id": "a", "id": "a:sample:0", "path": "", "is_own": False, "is_gone": False,
                   "num_joined": 0, "origin": "/0"}  # fmt: skip
        for event in ({"event": "session", **session}, {"event": "sampler", **sampler}):
            await journal.append(event | version)
        await journal.close()

    asyncio.run(write())
    if version == {"format": 3}:
        with pytest.raises(ConfigError, match="in format 3; this one reads up to 2"):
            Sessions(tmp_path, 0.0, keep=3)
    else:
        assert Sessions(tmp_path, 0.0, keep=3).sampler("alice", "a:sample:0").save == ""


def test_a_damaged_journal_of_sessions_keeps_the_server_from_starting(tmp_path):
    async def act(_, http):
        for name in "ab":
            await Client(http).session(name)

    serve(tmp_path, act)
    journal = tmp_path / "sessions.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:30] + b"\0" + data[31:])
    with pytest.raises(JournalDamaged, match=r"sessions\.journal: the record at byte 0 is damaged"):
        Service(CONFIG, FakeBackend(), tmp_path, Tenants(CONFIG))
    journal.write_bytes(data)
    serve(tmp_path, act)
