"""Carries out the requests of training clients on the ranks, one after the other.

    pick (schedule.py) ─▶ adapter on the ranks? else newest snapshot, later requests repeated ─▶ carry out
                       ─▶ result on the disk ─▶ told ─▶ a snapshot every `serve.snapshot_every` requests

After `TrainerLost` other ranks start, and each adapter is brought back when its next request comes. A request that
fails by itself is left out when the others are repeated.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.conf.serve import ServeConfig
from penstock.serve.backend import Backend, BackendFailed, DeadlyRequest, RequestFailed, TrainerLost
from penstock.serve.checkpoints import Address, Checkpoint, Checkpoints, NoCheckpoint
from penstock.serve.journal import JournalError
from penstock.serve.request_log import Entry, failure_of
from penstock.serve.samples import Samples
from penstock.serve.sdk_messages import Answer, Call, ForwardCall, LoadCall, SaveCall, failure, forward_answer, plain
from penstock.serve.sessions import Sessions
from penstock.serve.tenants import NextRequest, Schedule, Tenants
from penstock.serve.training_client import CHANGING, TrainingClient
from penstock.workers.protocols import AdamParams, AdapterSpec, AdapterState

_LOG = logging.getLogger("penstock")
LOOK_S = 1.0
"""Seconds between looks at what comes by itself."""
DISK_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a request whose result could not be written is carried out again; they double each time."""
Chore = Callable[[TrainingClient], Awaitable[None]]


class _StateLost(PenstockError):
    """A state that an adapter cannot be brought back from."""


class Ranks:
    """Lifecycle: `run` until `drain`; `wake` after anything has come."""

    def __init__(
        self, backend: Backend, clients: Mapping[str, TrainingClient], config: ServeConfig, tenants: Tenants,
        work: "TrainingWork",
    ) -> None:  # fmt: skip
        self._backend, self._clients, self._config = backend, clients, config
        self._tenants, self._work, self._schedule = tenants, work, Schedule(tenants.shares, tenants.budgets)
        self._resident: dict[str, TrainingClient] = {}
        """Those on the ranks, the one that has rested longest first."""
        self._chores: deque[tuple[TrainingClient, Chore, asyncio.Event]] = deque()
        self._wake = asyncio.Event()
        self._is_ending = False
        self.num_losses = 0
        self.current = ""
        """Training client whose request is being carried out."""
        self.num_waiting = 0
        """Adapters that had a request when the last one was picked."""

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Carry out requests until `drain`, and write what no snapshot has then. Raises `BackendFailed`."""
        while self._chores or not self._is_ending:
            self._wake.clear()
            if self._chores:
                client, chore, is_done = self._chores.popleft()
                try:
                    await self._guarded(client, chore)
                finally:
                    is_done.set()
                continue
            await self._close_gaps()
            picked = self._picked()
            if picked is None or picked.next is None:
                await self._waited()
                continue
            self.current = picked.facts.model_id
            await self._carry_out(picked, picked.next)
            self.current = ""
        for client in list(self._resident.values()):
            try:
                await self._keep(client)
                await client.settled()
            except (PenstockError, OSError) as error:
                _LOG.warning("%s: %s", client.facts.model_id, error)

    def drain(self) -> None:
        """Let `run` end after the request under way."""
        self._is_ending = True
        self.wake()

    def rest(self, client: TrainingClient) -> None:
        """Bring an adapter to the disk when the ranks are free."""
        self._later(client, self._evict)

    async def drop(self, client: TrainingClient) -> None:
        """Forget an adapter for good; returns when the ranks have."""
        if not self._is_ending:
            await self._later(client, self._drop).wait()

    def _later(self, client: TrainingClient, chore: Chore) -> asyncio.Event:
        """Do something for a client when the ranks are free. Returns what is set then."""
        is_done = asyncio.Event()
        self._chores.append((client, chore, is_done))
        self.wake()
        return is_done

    def _picked(self) -> TrainingClient | None:
        now = time.monotonic()
        ready = [(name, one.facts.tenant, one.next) for name, one in self._clients.items() if one.rests_until <= now]
        waiting = [NextRequest(name, tenant, entry.tokens) for name, tenant, entry in ready if entry is not None]
        self.num_waiting = len(waiting)
        chosen = self._schedule.pick(waiting, now) if waiting else None
        return self._clients[chosen.queue] if chosen is not None else None

    async def _waited(self) -> None:
        """Wait until something comes, or may come by itself: a budget, a gap's deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()

    async def _close_gaps(self) -> None:
        """Give up waiting for requests that have not come within `serve.gap_s`."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            gap = client.gap
            if gap is None:
                client.gap_since = None
            elif client.gap_since is None:
                client.gap_since = now
            elif now - client.gap_since > self._config.gap_s and client.rests_until <= now:
                text = (f"request {gap} did not come within {self._config.gap_s:g} s (serve.gap_s), and this one comes "
                        "after it. Make a new training client from the last checkpoint.")  # fmt: skip
                try:
                    for entry in client.log.pending():
                        await client.log.answer(entry, failure(text, is_users=True))
                except JournalError as error:
                    self._pause(client, error)
                else:
                    client.finish()

    async def _carry_out(self, client: TrainingClient, entry: Entry) -> None:
        started = time.monotonic()
        try:
            await client.log.answer(entry, await self._answered(client, entry))
        except JournalError as error:
            self._pause(client, error)
            return
        client.finish()
        self._tenants.note(client.facts.tenant, entry, time.monotonic() - started)
        client.num_unsaved += entry.kind in CHANGING and not entry.is_failure
        is_load = entry.kind in ("load_model", "load_weights")
        if is_load or entry.kind == "save_weights" or client.num_unsaved >= self._config.snapshot_every:
            await self._guarded(client, self._keep)
        if is_load:
            await client.settled()  # its name may stand for another save when it is repeated

    def _pause(self, client: TrainingClient, error: JournalError) -> None:
        """Pause a client whose files cannot be written or read now. No other client waits."""
        _LOG.warning("%s: %s", client.facts.model_id, error)
        self._forget(client)
        client.pause_s, client.trouble = min(LONGEST_PAUSE_S, 2 * client.pause_s or DISK_PAUSE_S), str(error)
        client.rests_until = time.monotonic() + client.pause_s

    async def _answered(self, client: TrainingClient, entry: Entry) -> Answer:
        """Carry out a request, on ranks that may be lost meanwhile. Raises `JournalError`, `BackendFailed`."""
        while not (refusal := self._tenants.refusal(client.facts.tenant, time.monotonic())):
            try:
                await (self._bring(client) if entry.seq > 0 else self._make_room(client))
                answer = await self._work.done(client, entry, await asyncio.to_thread(client.call_of, entry))
                if entry.kind in ("create_model", "load_model", "load_weights"):
                    self._hold(client)
                return answer
            except TrainerLost as error:
                await self._lost(client, error)
                if isinstance(error, RequestFailed):
                    return failure(str(error), is_users=False)
            except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
                if not client.is_resident or not isinstance(error, PenstockError):
                    self._forget(client)
                return failure_of(error, f"{client.facts.model_id}: request {entry.seq}")
        return failure(refusal, is_users=True)

    async def _bring(self, client: TrainingClient) -> None:
        """Bring an adapter to the ranks, if it is not there, in the state before the client's next request."""
        name = client.facts.model_id
        if client.is_resident:
            self._resident[name] = self._resident.pop(name)
            return
        if client.has_failed:
            raise _StateLost("the adapter could not be made: see the error of its creation.")
        await self._make_room(client)
        try:
            state = await client.newest()
            if state is not None:
                await self._backend.drop_adapter(name)
                await self._backend.create_adapter(name, state.spec, state)
            for entry in client.repeated():
                await self._work.done(client, entry, await asyncio.to_thread(client.call_of, entry))
        except (DataError, ConfigError) as error:
            raise _StateLost(f"the adapter's state cannot be brought back: {error}") from error
        self._hold(client)

    async def _make_room(self, client: TrainingClient) -> None:
        """Bring adapters that have rested longest to the disk until another one has room."""
        while len(self._resident) >= self._config.max_resident:
            oldest = next(iter(self._resident.values()))
            if oldest is client:
                break
            await self._evict(oldest)

    async def _evict(self, client: TrainingClient) -> None:
        if client.is_resident:
            await self._keep(client)
            await client.settled()
            await self._drop(client)

    async def _drop(self, client: TrainingClient) -> None:
        self._forget(client)
        await self._backend.drop_adapter(client.facts.model_id)

    async def _keep(self, client: TrainingClient) -> None:
        """Take a snapshot, if anything has changed since the last one."""
        if client.is_resident and client.repeated():
            state = await self._backend.adapter_state(client.facts.model_id)
            await client.keep(state, client.next_seq - 1)
            client.num_unsaved = 0

    def _hold(self, client: TrainingClient) -> None:
        client.is_resident = True
        self._resident.pop(client.facts.model_id, None)
        self._resident[client.facts.model_id] = client

    def _forget(self, client: TrainingClient) -> None:
        """Note that the ranks have an adapter no more, or not in the state that is told of."""
        client.is_resident = False
        self._resident.pop(client.facts.model_id, None)

    async def _lost(self, client: TrainingClient, error: TrainerLost) -> None:
        """Have other ranks start. `client`: whose work the others were lost at. Raises `BackendFailed`."""
        self.num_losses += 1
        for one in list(self._resident.values()):
            self._forget(one)
        try:
            await self._backend.bring_back(client.facts.tenant, error)
        except DeadlyRequest as again:
            self._tenants.refuse(client.facts.tenant, str(again), time.monotonic() + self._backend.window_s)

    async def _guarded(self, client: TrainingClient, chore: Chore) -> None:
        """Do for a client what is not a request: its failure is told, and costs no request. Raises `BackendFailed`."""
        try:
            await chore(client)
        except TrainerLost as error:
            await self._lost(client, error)
        except BackendFailed:
            raise
        except (PenstockError, OSError) as error:
            _LOG.warning("%s", error)


class TrainingWork:
    """Requests on an adapter that is on the ranks. Stateless: a second time `done` comes to the same."""

    def __init__(
        self, backend: Backend, checkpoints: Checkpoints, samples: Samples, sessions: Sessions, tenants: Tenants
    ) -> None:
        self._backend, self._checkpoints, self._samples, self._sessions = backend, checkpoints, samples, sessions
        self._tenants = tenants

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
            case AdapterSpec():
                await self._put(client, call, None)
                return plain({"model_id": name, "type": "create_model"})
        raise DataError(f"{entry.kind} is no request of a training client.")

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
        admit = partial(self._refuse_full, client.facts.tenant)
        await asyncio.to_thread(lambda: self._checkpoints.save(facts, kept, overwrite=call.overwrite, admit=admit))
        if call.overwrite:
            await self._samples.drop_saves(facts)
        return plain({"path": facts.path, "type": entry.kind})

    def _refuse_full(self, tenant: str, num_bytes: int) -> None:
        """Raise `DataError` for a save by which a tenant would have more on the disk than it may."""
        most_gib = self._tenants.configs[tenant].max_stored_gib
        runs = [run.model_id for run in self._sessions.runs(tenant)]
        stored = self._checkpoints.num_bytes(runs)
        if most_gib and stored + num_bytes > most_gib * 2**30:
            oldest = ", ".join(one.path for one in self._checkpoints.of_runs(*runs)[:3])
            raise DataError(f"the saved weights of this key take {stored / 2**30:.3g} GiB, and it has {most_gib:g} "
                            f"(max_stored_gib). Delete some with delete_checkpoint_from_tinker_path, the oldest are "
                            f"{oldest}; then save again, with ttl_seconds if they are needed for a while.")  # fmt: skip

    async def _publish(self, client: TrainingClient, entry: Entry, call: SaveCall) -> Answer:
        state = await self._backend.adapter_state(client.facts.model_id)
        sampler = await self._samples.add_own(client, entry.seq, call.sampling_seq or 0, state.for_sampling())
        return plain({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})

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
