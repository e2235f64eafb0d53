"""What each kind of request of a training client does, on an adapter that is on the ranks."""

import asyncio
import time
from typing import Any

from penstock.conf.errors import DataError
from penstock.orchestrator.serve.backend import Backend
from penstock.orchestrator.serve.checkpoints import Address, Checkpoint, Checkpoints, NoCheckpoint
from penstock.orchestrator.serve.request_log import Entry
from penstock.orchestrator.serve.samples import Samples
from penstock.orchestrator.serve.sessions import Sessions
from penstock.orchestrator.serve.training_client import TrainingClient
from penstock.orchestrator.serve.wire.results import Answer, forward_answer, plain
from penstock.orchestrator.serve.wire.training import Call, CreateCall, ForwardCall, LoadCall, SaveCall
from penstock.workers.training_calls import AdamParams, AdapterSpec, AdapterState


class TrainingWork:
    """Stateless. `done` carries out a request; a second time it comes to the same."""

    def __init__(self, backend: Backend, checkpoints: Checkpoints, samples: Samples, sessions: Sessions) -> None:
        self._backend, self._checkpoints, self._samples, self._sessions = backend, checkpoints, samples, sessions

    async def done(self, client: TrainingClient, entry: Entry, call: Call) -> Answer:
        """Carry out a request. Raises what `Backend` raises, and `DataError`."""
        name = client.facts.model_id
        match call:
            case ForwardCall():
                output = await self._backend.forward(name, call.data, call.loss, backward=call.backward)
                return await asyncio.to_thread(forward_answer, output)
            case AdamParams():
                return plain({"metrics": await self._backend.optim_step(name, call)})
            case SaveCall(name=None, is_sampler=True):
                return await self._publish(client, entry, call)
            case SaveCall():
                return await self._save(client, entry, call)
            case LoadCall():
                return await self._load(client, call)
            case CreateCall():
                return await self._create(client, call)
        raise DataError(f"{entry.kind} is no request of a training client.")

    async def _create(self, client: TrainingClient, call: CreateCall) -> Answer:
        name = client.facts.model_id
        state = await self._read(client, call.path, call.with_optimizer) if call.path is not None else None
        spec = state.spec if state is not None else call.spec
        if spec is None:
            raise DataError("neither a checkpoint nor a spec is given.")
        await self._put(client, spec, state)
        if call.path is None:
            return plain({"model_id": name, "type": "create_model"})
        return plain({"model_id": name, "path": call.path, "type": "load_weights"})

    async def _load(self, client: TrainingClient, call: LoadCall) -> Answer:
        state = await self._read(client, call.path, call.with_optimizer)
        if client.spec is not None and _shape(state.spec) != _shape(client.spec):
            raise DataError(f"{call.path} is of an adapter of {_shape(state.spec)}, this client's of "
                            f"{_shape(client.spec)}. Make a training client from that state.")  # fmt: skip
        await self._put(client, state.spec, state)
        return plain({"model_id": client.facts.model_id, "path": call.path, "type": "load_weights"})

    async def _put(self, client: TrainingClient, spec: AdapterSpec, state: AdapterState | None) -> None:
        """Replace the adapter on the ranks. It is resident once whoever asked for this has noted so."""
        client.is_resident = False
        await self._backend.drop_adapter(client.facts.model_id)
        await self._backend.create_adapter(client.facts.model_id, spec, state)
        client.spec = spec

    async def _save(self, client: TrainingClient, entry: Entry, call: SaveCall) -> Answer:
        state = await self._backend.adapter_state(client.facts.model_id)
        folder = "sampler_weights" if call.is_sampler else "weights"
        name, now = call.name or f"{entry.seq:06d}", time.time()
        expires = now + call.ttl_s if call.ttl_s is not None else None
        facts = Checkpoint(client.facts.model_id, folder, name, entry.seq, now, 0, expires, call.metadata)
        kept = state.for_sampling() if call.is_sampler else state
        await asyncio.to_thread(lambda: self._checkpoints.save(facts, kept, overwrite=call.overwrite))
        if call.overwrite:
            await self._samples.drop_saves(facts.address)
        return plain({"path": facts.address.path, "type": entry.kind})

    async def _publish(self, client: TrainingClient, entry: Entry, call: SaveCall) -> Answer:
        state = await self._backend.adapter_state(client.facts.model_id)
        sampler = await self._samples.add_own(client, entry.seq, call.sampling_seq or 0, state.for_sampling())
        told: dict[str, Any] = {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}
        return plain(told)

    async def _read(self, client: TrainingClient, path: str, with_optimizer: bool) -> AdapterState:
        """The state of a checkpoint of the tenant's."""
        address = Address.parse(path)
        facts = self._sessions.facts.get(address.run)
        if facts is None or facts.tenant != client.facts.tenant:
            raise NoCheckpoint(f"{path}: there is no such checkpoint.")
        return await asyncio.to_thread(lambda: self._checkpoints.state(address, with_optimizer=with_optimizer))


def _shape(spec: AdapterSpec) -> str:
    if spec.is_whole:
        return "all weights"
    flags = [name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(spec, name)]
    return f"rank {spec.rank} ({', '.join(flags)})"
