"""A name of weights stands for its newest save; whoever samples from an older one stays with it."""

import asyncio
import io
import json
import tarfile

import httpx
import numpy as np
import pytest

from penstock.conf.errors import DataError
from penstock.conf.serve import ServeConfig
from penstock.serve import saved_weights
from penstock.serve.command import Server
from penstock.serve.saved_weights import Checkpoint, Checkpoints, NotFound, WeightsAddress, read_spec
from penstock.serve.service import Service
from penstock.serve.tenants import Tenants
from penstock.workers.protocols import AdapterSpec
from tests.power_cuts import recorded
from tests.serve.fake_backend import NAMES, Adapter, FakeBackend
from tests.serve.scripted_client import forward_body
from tests.serve.test_server import Client, sample_body, serve


class Watched(FakeBackend):
    """Notes the size of the weights that each sample is drawn from."""

    def __init__(self):
        super().__init__()
        self.drawn_from = []

    async def sample(self, sampler, call, tenant):
        self.drawn_from.append(float(np.abs(self.samplers[sampler][NAMES[1]]).sum()))
        return await super().sample(sampler, call, tenant)


class Loop:
    """A client that trains a step, saves under a name and samples from it."""

    def __init__(self, http, directory, key="tml-any"):
        self.client, self.seq, self.num_samplers, self.directory = Client(http, key), 0, 0, directory

    async def open(self):
        self.session = await self.client.session()
        self.model = (await self.client.result(await self.client.adapter(self.session)))["model_id"]
        return self

    async def ask(self, kind, **fields):
        self.seq += 1
        asked = {**fields, "model_id": self.model, "seq_id": self.seq}
        return await self.client.result(await self.client.post(kind, asked))

    async def step(self):
        await self.ask("forward_backward", **forward_body([1, 2, 3], 1.0))
        await self.ask("optim_step", adam_params={"learning_rate": 0.1})

    async def save(self, **more):
        await self.step()
        return (await self.ask("save_weights_for_sampler", path="same", **more))["path"]

    async def sampler(self, path, session=None):
        self.num_samplers += 1
        made = {"session_id": session or self.session, "sampling_session_seq_id": self.num_samplers, "model_path": path}
        return (await self.client.post("create_sampling_session", made))["sampling_session_id"]

    async def sample(self, sampler, seq=0):
        return await self.client.result(await self.client.post("asample", sample_body(sampler, seq)))

    def files(self):
        return sorted(file.name for file in self.directory.glob("checkpoints/*/sampler_weights/same/*"))


def test_a_new_sampling_session_reads_what_overwrote_and_an_open_one_stays(tmp_path):
    backend, seen = Watched(), {}

    async def act(_, http):
        loop = seen["loop"] = await Loop(http, tmp_path).open()
        samplers = []
        for _ in range(3):
            samplers.append(await loop.sampler(await loop.save(overwrite=True)))
            await loop.sample(samplers[-1])
        newest = list(backend.drawn_from)
        assert newest == sorted(set(newest))
        for sampler in samplers:
            await loop.sample(sampler, 1)
        assert backend.drawn_from[3:] == newest
        assert len(loop.files()) == 4
        seen["samplers"], seen["newest"] = samplers, newest

    async def again(_, http):
        loop, then = Loop(http, tmp_path), seen["loop"]
        for sampler in seen["samplers"]:
            await loop.sample(sampler, 2)
        assert backend.drawn_from[6:] == seen["newest"]
        loop.session, loop.model, loop.seq, loop.num_samplers = then.session, then.model, then.seq, then.num_samplers
        await loop.sample(await loop.sampler(f"tinker://{loop.model}/sampler_weights/same"))
        assert backend.drawn_from[-1] == seen["newest"][-1]

    serve(tmp_path, act, backend)
    serve(tmp_path, again, backend)


def test_an_old_save_goes_with_the_last_session_that_names_it(tmp_path):
    backend = Watched()

    async def act(_, http):
        loop = await Loop(http, tmp_path).open()
        other = await loop.client.session("other")
        path = await loop.save()
        await loop.sample(await loop.sampler(path, other))
        await loop.save(overwrite=True)
        await loop.save(overwrite=True)  # nobody samples from the second
        assert loop.files() == ["checkpoint.json", "state-3.safetensors", "state-9.safetensors"]
        await loop.client.post(f"sessions/{other}/finish", {"reason": {"type": "success"}}, 204)
        assert loop.files() == ["checkpoint.json", "state-9.safetensors"]
        assert backend.samplers == {}
        await loop.client.http.delete(
            f"/api/v1/training_runs/{loop.model}/checkpoints/sampler_weights/same", headers=loop.client.headers
        )
        assert not list(tmp_path.glob("checkpoints/*/*/*"))

    serve(tmp_path, act, backend)


def test_who_samples_from_deleted_weights_never_gets_those_saved_after_them(tmp_path):
    async def act(_, http):
        loop = await Loop(http, tmp_path).open()
        sampler = await loop.sampler(await loop.save())
        await loop.client.http.delete(
            f"/api/v1/training_runs/{loop.model}/checkpoints/sampler_weights/same", headers=loop.client.headers
        )
        await loop.save()
        assert "there is no such checkpoint" in (await loop.sample(sampler))["error"]

    serve(tmp_path, act, Watched())


def test_an_old_save_that_a_killed_server_left_goes_after_the_next_start(tmp_path):
    async def act(_, http):
        loop = await Loop(http, tmp_path).open()
        await loop.save()
        (folder,) = tmp_path.glob("checkpoints/*/*/same")
        (folder / "state-1.safetensors").write_bytes(b"old")

    async def again(_, http):
        while list(tmp_path.glob("checkpoints/*/*/same/state-1.safetensors")):
            await asyncio.sleep(0.01)

    serve(tmp_path, act)
    serve(tmp_path, again)


def test_another_request_does_not_replace_unnamed_weights_of_the_same_number(tmp_path):
    backend = Watched()

    async def act(_, http):
        loop = await Loop(http, tmp_path).open()
        await loop.step()
        sampler = (await loop.ask("save_weights_for_sampler", sampling_session_seq_id=0))["sampling_session_id"]
        await loop.sample(sampler)
        await loop.step()
        refused = await loop.ask("save_weights_for_sampler", sampling_session_seq_id=0)
        assert "was made before, of other weights" in refused["error"]
        await loop.sample(sampler, 1)
        assert len(set(backend.drawn_from)) == 1

    serve(tmp_path, act, backend)


def facts(seq):
    return Checkpoint("run", "weights", "name", seq, 1.0, 0)


def state(size):
    return Adapter.of(AdapterSpec(size, 0), None).state()


def test_an_archive_names_its_own_files(tmp_path):
    saves = Checkpoints(tmp_path)
    address = saves.save(facts(3), state(2), overwrite=False)
    with tarfile.open(fileobj=io.BytesIO(b"".join(saves.archive(address)))) as archive:
        told = json.loads(archive.extractfile("checkpoint.json").read())
        assert told["file"] in archive.getnames()


def test_a_save_that_is_repeated_keeps_the_bits_that_clients_may_know(tmp_path):
    saves = Checkpoints(tmp_path)
    first = saves.save(facts(3), state(2), overwrite=False)
    assert saves.save(facts(3), state(3), overwrite=False) == first
    assert read_spec(saves.file(first)).rank == 2
    with pytest.raises(DataError, match="overwrite=True"):
        saves.save(facts(4), state(2), overwrite=False)


def test_a_save_that_dies_between_state_and_facts_leaves_the_one_before(tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path)
    before = saves.save(facts(3), state(2), overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(saved_weights, "write_whole", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saves.save(facts(4), state(3), overwrite=True)
    assert (saves.get(before), read_spec(saves.file(before)).rank) == (before, 2)
    assert saves.save(facts(4), state(4), overwrite=True).seq == 4
    assert read_spec(saves.file(before)).rank == 4


def test_checkpoints_of_the_version_before_are_read_overwritten_and_deleted(tmp_path):
    saves = Checkpoints(tmp_path)
    address = saves.save(facts(3), state(2), overwrite=False)
    folder = tmp_path / "run" / "weights" / "name"
    (folder / "state-3.safetensors").rename(folder / "state.safetensors")
    told = json.loads((folder / "checkpoint.json").read_text())
    del told["file"]
    (folder / "checkpoint.json").write_text(json.dumps(told))
    assert read_spec(saves.file(address)).rank == 2
    saves.save(facts(4), state(3), overwrite=True)
    assert read_spec(saves.file(address)).rank == 3
    old = "run/weights/name/state.safetensors"
    assert saves.superseded_saves(address) == [old]
    assert saves.file(address, old).exists()
    saves.delete(address)
    with pytest.raises(NotFound):
        saves.file(address)
    saves.remove(old)
    assert not folder.exists()


def test_a_power_cut_loses_nothing_that_was_answered(tmp_path):
    async def life(disk):
        server = Server(ServeConfig(port=0), FakeBackend(), tmp_path)
        url = await server.start()
        disk.promise((server.key, "", "", 0))
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            loop = await Loop(http, tmp_path, server.key).open()
            for seq in (3, 6):
                path = await loop.save(overwrite=True)
                disk.promise((server.key, loop.model, path, seq))
        await server.drain()

    async def next_life(promised, place):
        key, model, path, seq = promised
        known = (place / "key.sha256").read_text() if (place / "key.sha256").exists() else ""
        tenants = Tenants(ServeConfig(), "", known)
        assert tenants.tenant_of(key) is not None
        service = Service(ServeConfig(), FakeBackend(), place, tenants)
        await service.open()
        assert not model or model in service.sessions.open_clients
        saves = Checkpoints(place / "checkpoints")
        assert not path or saves.get(WeightsAddress.parse(path)).seq >= seq
        assert not path or saves.state(WeightsAddress.parse(path), with_optimizer=False).tensors
        await service.close()

    async def every_life():
        with recorded(tmp_path, num_mixtures=1) as disk:
            await life(disk)
        for promised, place in disk.after_power_cuts():
            if promised:
                await next_life(promised, place)
        assert disk.num_moments > 50

    asyncio.run(every_life())
