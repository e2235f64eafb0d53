"""Training clients, and the ranks that carry out their requests, one after the other.

A client has an adapter. Its requests are numbered from 1 without gaps; the one that makes the adapter is 0. They may
come in any order, and are carried out strictly in theirs. The state is on the ranks, or goes on from here:

    snapshot-N.safetensors   the state after request N
    requests.journal         all later requests, which are repeated on it
    results.journal          their results

    pick (tenants.py) ─▶ adapter on the ranks? else newest snapshot, later requests repeated ─▶ carry out
                      ─▶ result on the disk ─▶ sent ─▶ a snapshot every `serve.snapshot_every` requests

A result is on the disk before a snapshot that has its request in it, so no request is ever repeated on a state that has
seen it. After `TrainerLost` other ranks start, and each adapter is brought back when its next request comes. A request
that fails by itself is left out when the others are repeated.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.conf.serve import ServeConfig
from penstock.orchestrator.loops.verbs import seed_of
from penstock.serve import sdk_messages as sdk
from penstock.serve.backend import Backend, BackendFailed, DeadlyRequest, RequestFailed, TrainerLost
from penstock.serve.journal import Entry, JournalError, RequestLog, WrongNumber
from penstock.serve.samples import Samples, failure_of
from penstock.serve.saved_weights import Checkpoint, Checkpoints, NotFound, WeightsAddress, read_state, write_state
from penstock.serve.sdk_messages import ForwardCall, LoadCall, RequestResult, SaveCall, failure, plain
from penstock.serve.sessions import ClientFacts, Sessions
from penstock.serve.tenants import NextRequest, Schedule, Tenants
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import AdamParams, AdapterSpec, AdapterState

_LOG = logging.getLogger("penstock")
LOOK_S = 1.0
"""Seconds between checks of budgets and gaps, which change with time."""
DISK_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a request whose result could not be written is carried out again; they double each time."""


class TrainingClient:
    """Lifecycle: made for a directory, new or left by another process; `accept` requests; whoever carries them out
    takes `next`, `start` states and `finish` requests; `close`."""

    def __init__(self, facts: ClientFacts, directory: Path, keep: int, max_rank: int) -> None:
        self.facts, self._directory, self._max_rank = facts, directory, max_rank
        self.log = RequestLog(directory, keep, self._is_needed)
        self.is_resident = False
        """Whether the ranks have the adapter, in the state before `next_seq`."""
        self.gap_since: float | None = None
        self.num_unsaved = 0
        self.pause_s, self.rests_until, self.trouble = 0.0, 0.0, ""
        """Length and end of the pause after its files could not be written or read, and the reason."""
        self.next_seq = self.log.highest_answered + 1
        for entry in self.log.entries.values():
            if entry.seq < self.next_seq:  # also where its result is gone
                entry.is_done.set()
                self.log.waiting.pop(entry.seq, None)
        found = sorted((int(file.stem.rpartition("-")[2]), file) for file in directory.glob("snapshot-*.safetensors"))
        self._snapshot: Path | None = found[-1][1] if found else None
        self.snapshot_seq = found[-1][0] if found else -1
        for _, file in found[:-1]:
            file.unlink(missing_ok=True)
        self.spec: AdapterSpec | None = None
        """The adapter's shape; None while it is not made."""
        self._writing: asyncio.Task[None] | None = None

    async def accept(self, entry: Entry, body: bytes, identity: bytes = b"") -> Entry:
        """Take a request, or recognise one that was taken. Raises `WrongNumber`, `JournalError`."""
        if entry.seq < self.next_seq and entry.seq not in self.log.entries:
            raise WrongNumber(
                f"request {entry.seq} of {self.facts.model_id} comes too late: {self.next_seq} is the next. Make a new "
                "training client from the last checkpoint."
            )
        return await self.log.accept(entry, body, identity)

    @property
    def next(self) -> Entry | None:
        """The request whose turn it is, if it has come."""
        entry = self.log.entries.get(self.next_seq)
        return entry if entry is not None and entry.is_durable.is_set() and not entry.is_done.is_set() else None

    @property
    def gap(self) -> int | None:
        """Number of the request that later ones wait for, if it has not come."""
        is_missing = self.next_seq not in self.log.entries and self.next_seq < self.log.highest_taken
        return self.next_seq if is_missing else None

    def call_of(self, entry: Entry) -> sdk.Call:
        """What a request asks for, from any thread. Raises `BadRequest`."""
        return decoded(entry, self.log.body_of(entry), self.facts, self._max_rank)

    def finish(self) -> None:
        """Advance to the request after the one that was answered."""
        self.pause_s, self.trouble = 0.0, ""
        self.next_seq = self.log.highest_answered + 1

    def requests_to_repeat(self) -> list[Entry]:
        """Requests that have to be repeated on the newest snapshot, in order."""
        later = [one for one in self.log.entries.values() if self.snapshot_seq < one.seq < self.next_seq]
        return sorted((one for one in later if one.changes), key=lambda one: one.seq)

    async def read_snapshot(self) -> AdapterState | None:
        """The newest snapshot; None before the first one. Raises `DataError`."""
        await self.wait_for_snapshot()
        if self._snapshot is None:
            return None
        state = await asyncio.to_thread(read_state, self._snapshot)
        self.spec = state.spec
        return state

    async def write_snapshot(self, state: AdapterState, seq: int) -> None:
        """Write the state after request `seq` as a snapshot, in the background. The snapshot before is dropped."""
        await self.wait_for_snapshot()
        self._writing = asyncio.create_task(self._write(state, seq))

    async def wait_for_snapshot(self) -> None:
        """Wait until no snapshot is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def close(self) -> None:
        await self.wait_for_snapshot()
        await self.log.close()

    async def _write(self, state: AdapterState, seq: int) -> None:
        file, before = self._directory / f"snapshot-{seq}.safetensors", self._snapshot
        try:
            await asyncio.to_thread(write_state, file, state)
            self.snapshot_seq, self._snapshot = seq, file
            if before is not None and before != file:
                before.unlink(missing_ok=True)
            await self.log.drop_bodies()
        except PenstockError as error:
            _LOG.warning("%s: no snapshot after request %d: %s. It is tried again.", self.facts.model_id, seq, error)

    def _is_needed(self, entry: Entry) -> bool:
        """Return whether a request that has its result may be repeated, or says that the adapter could not be made."""
        return entry.seq > self.snapshot_seq and (entry.seq == 0 or entry.changes)


Chore = Callable[[TrainingClient], Awaitable[None]]


class TrainingLoop:
    """Lifecycle: `run` until `drain`; `wake` after anything has come."""

    def __init__(
        self, backend: Backend, clients: Mapping[str, TrainingClient], config: ServeConfig, tenants: Tenants,
        checkpoints: Checkpoints, samples: Samples, sessions: Sessions,
    ) -> None:  # fmt: skip
        self._backend, self._clients, self._config, self._tenants = backend, clients, config, tenants
        self._checkpoints, self._samples, self._sessions = checkpoints, samples, sessions
        self._schedule = Schedule(tenants.shares, tenants.budgets)
        self._resident: dict[str, TrainingClient] = {}
        """Clients whose adapters are on the ranks, the least recently used first."""
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
                    await self._run_chore(client, chore)
                finally:
                    is_done.set()
                continue
            await self._close_gaps()
            picked = self._pick_client()
            if picked is not None and picked.next is not None:
                self.current = picked.facts.model_id
                await self._carry_out(picked, picked.next)
                self.current = ""
                continue
            with contextlib.suppress(TimeoutError):  # until a request comes, or a budget or a gap's deadline may
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
        for client in list(self._resident.values()):
            try:
                await self._take_snapshot(client)
                await client.wait_for_snapshot()
            except (PenstockError, OSError) as error:
                _LOG.warning("%s: %s", client.facts.model_id, error)

    def drain(self) -> None:
        """Let `run` end after the request under way."""
        self._is_ending = True
        self.wake()

    def rest(self, client: TrainingClient) -> None:
        """Move an adapter to the disk when the ranks are free."""
        self._queue_chore(client, self._evict)

    async def drop(self, client: TrainingClient) -> None:
        """Forget an adapter for good; returns when the ranks have."""
        if not self._is_ending:
            await self._queue_chore(client, self._drop_adapter).wait()

    def _queue_chore(self, client: TrainingClient, chore: Chore) -> asyncio.Event:
        """Queue work for a client until the ranks are free. Returns an event that is set once it is done."""
        is_done = asyncio.Event()
        self._chores.append((client, chore, is_done))
        self.wake()
        return is_done

    def _pick_client(self) -> TrainingClient | None:
        now = time.monotonic()
        ready = [(name, one.facts.tenant, one.next) for name, one in self._clients.items() if one.rests_until <= now]
        waiting = [NextRequest(name, tenant, entry.tokens) for name, tenant, entry in ready if entry is not None]
        self.num_waiting = len(waiting)
        chosen = self._schedule.pick(waiting, now) if waiting else None
        return self._clients[chosen.queue] if chosen is not None else None

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
            await client.log.answer(entry, await self._result_of(client, entry))
        except JournalError as error:
            self._pause(client, error)
            return
        client.finish()
        self._tenants.count_request(client.facts.tenant, entry, time.monotonic() - started)
        client.num_unsaved += entry.changes
        is_load = entry.kind in ("load_model", "load_weights")
        if is_load or entry.kind == "save_weights" or client.num_unsaved >= self._config.snapshot_every:
            await self._run_chore(client, self._take_snapshot)
        if is_load:
            await client.wait_for_snapshot()  # its name may stand for another save when it is repeated

    def _pause(self, client: TrainingClient, error: JournalError) -> None:
        """Pause a client whose files cannot be written or read now. No other client waits."""
        _LOG.warning("%s: %s", client.facts.model_id, error)
        self._mark_absent(client)
        client.pause_s, client.trouble = min(LONGEST_PAUSE_S, 2 * client.pause_s or DISK_PAUSE_S), str(error)
        client.rests_until = time.monotonic() + client.pause_s

    async def _result_of(self, client: TrainingClient, entry: Entry) -> RequestResult:
        """Carry out a request, on ranks that may be lost meanwhile. Raises `JournalError`, `BackendFailed`."""
        while not (refusal := self._tenants.refusal(client.facts.tenant, time.monotonic())):
            try:
                await (self._load_adapter(client) if entry.seq > 0 else self._make_room(client))
                answer = await self._run_request(client, entry, await asyncio.to_thread(client.call_of, entry))
                if entry.kind in ("create_model", "load_model", "load_weights"):
                    self._mark_resident(client)
                return answer
            except TrainerLost as error:
                await self._replace_ranks(client, error)
                if isinstance(error, RequestFailed):
                    return failure(str(error), is_users=False)
            except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
                if not client.is_resident or not isinstance(error, PenstockError):
                    self._mark_absent(client)
                return failure_of(error, f"{client.facts.model_id}: request {entry.seq}")
        return failure(refusal, is_users=True)

    async def _load_adapter(self, client: TrainingClient) -> None:
        """Bring an adapter to the ranks, if it is not there, in the state before the client's next request."""
        name = client.facts.model_id
        if client.is_resident:
            self._resident[name] = self._resident.pop(name)
            return
        if (first := client.log.entries.get(0)) is not None and first.is_failure:
            raise PenstockError("the adapter could not be made: see the error of its creation.")
        await self._make_room(client)
        try:
            state = await client.read_snapshot()
            if state is not None:
                await self._backend.drop_adapter(name)
                await self._backend.create_adapter(name, state.spec, state)
            for entry in client.requests_to_repeat():
                await self._run_request(client, entry, await asyncio.to_thread(client.call_of, entry))
        except (DataError, ConfigError) as error:
            raise PenstockError(f"the adapter's state cannot be brought back: {error}") from error
        self._mark_resident(client)

    async def _make_room(self, client: TrainingClient) -> None:
        """Move the least recently used adapters to the disk until another one has room."""
        while len(self._resident) >= self._config.max_resident:
            oldest = next(iter(self._resident.values()))
            if oldest is client:
                break
            await self._evict(oldest)

    async def _evict(self, client: TrainingClient) -> None:
        if client.is_resident:
            await self._take_snapshot(client)
            await client.wait_for_snapshot()
            await self._drop_adapter(client)

    async def _drop_adapter(self, client: TrainingClient) -> None:
        self._mark_absent(client)
        await self._backend.drop_adapter(client.facts.model_id)

    async def _take_snapshot(self, client: TrainingClient) -> None:
        """Take a snapshot, if anything has changed since the last one."""
        if client.is_resident and client.requests_to_repeat():
            state = await self._backend.adapter_state(client.facts.model_id)
            await client.write_snapshot(state, client.next_seq - 1)
            client.num_unsaved = 0

    def _mark_resident(self, client: TrainingClient) -> None:
        client.is_resident = True
        self._resident.pop(client.facts.model_id, None)
        self._resident[client.facts.model_id] = client

    def _mark_absent(self, client: TrainingClient) -> None:
        """Note that the ranks no longer have an adapter in its acknowledged state."""
        client.is_resident = False
        self._resident.pop(client.facts.model_id, None)

    async def _replace_ranks(self, client: TrainingClient, error: TrainerLost) -> None:
        """Start other ranks. `client`: whose request lost them. Raises `BackendFailed`."""
        self.num_losses += 1
        for one in list(self._resident.values()):
            self._mark_absent(one)
        try:
            await self._backend.bring_back(client.facts.tenant, error)
        except DeadlyRequest as again:
            self._tenants.refuse(client.facts.tenant, again, time.monotonic(), self._backend.window_s)

    async def _run_chore(self, client: TrainingClient, chore: Chore) -> None:
        """Run work for a client that is no request: a failure is logged, and fails none. Raises `BackendFailed`."""
        try:
            await chore(client)
        except TrainerLost as error:
            await self._replace_ranks(client, error)
        except BackendFailed:
            raise
        except (PenstockError, OSError) as error:
            _LOG.warning("%s", error)

    async def _run_request(self, client: TrainingClient, entry: Entry, call: sdk.Call) -> RequestResult:
        """Carry out a request. Raises what `Backend` raises, and `DataError`."""
        name = client.facts.model_id
        match call:
            case ForwardCall():
                output = await self._backend.forward(name, call.data, call.loss, backward=call.backward)
                return await asyncio.to_thread(sdk.forward_answer, output)
            case AdamParams():
                return plain({"metrics": await self._backend.optim_step(name, call)})
            case SaveCall(name=None, is_sampler=True):
                state = (await self._backend.adapter_state(name)).for_sampling()
                sampler = await self._samples.add_own(client.facts, entry.seq, call.sampling_seq or 0, state)
                return plain({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})
            case SaveCall():
                return await self._save(client, entry, call)
            case LoadCall():
                return await self._load(client, call)
            case AdapterSpec():
                await self._replace_adapter(client, call, None)
                return plain({"model_id": name, "type": "create_model"})
        raise DataError(f"{entry.kind} is no request of a training client.")

    async def _load(self, client: TrainingClient, call: LoadCall) -> RequestResult:
        address = WeightsAddress.parse(call.path)
        facts = self._sessions.facts.get(address.run)
        if facts is None or facts.tenant != client.facts.tenant:
            raise NotFound(f"{call.path}: there is no such checkpoint.")
        state = await asyncio.to_thread(self._checkpoints.state, address, with_optimizer=call.with_optimizer)
        if client.spec is not None and _shape(state.spec) != _shape(client.spec):
            raise DataError(f"{call.path} is of an adapter of {_shape(state.spec)}, this client's of "
                            f"{_shape(client.spec)}. Make a training client from that state.")  # fmt: skip
        await self._replace_adapter(client, state.spec, state)
        return plain({"model_id": client.facts.model_id, "path": call.path, "type": "load_weights"})

    async def _replace_adapter(self, client: TrainingClient, spec: AdapterSpec, state: AdapterState | None) -> None:
        """Replace the adapter on the ranks. It is resident once whoever asked for this has noted so."""
        client.is_resident = False
        await self._backend.drop_adapter(client.facts.model_id)
        await self._backend.create_adapter(client.facts.model_id, spec, state)
        client.spec = spec

    async def _save(self, client: TrainingClient, entry: Entry, call: SaveCall) -> RequestResult:
        state = await self._backend.adapter_state(client.facts.model_id)
        folder = "sampler_weights" if call.is_sampler else "weights"
        name, now = call.name or f"{entry.seq:06d}", time.time()
        expires = now + call.ttl_s if call.ttl_s is not None else None
        facts = Checkpoint(client.facts.model_id, folder, name, entry.seq, now, 0, expires, call.metadata)
        kept = state.for_sampling() if call.is_sampler else state
        admit = partial(self._refuse_full, client.facts.tenant)
        await asyncio.to_thread(lambda: self._checkpoints.save(facts, kept, overwrite=call.overwrite, admit=admit))
        if call.overwrite:
            await self._samples.drop_unused_saves(facts)
        return plain({"path": facts.path, "type": entry.kind})

    def _refuse_full(self, tenant: str, num_bytes: int) -> None:
        """Raise `DataError` for a save by which a tenant would have more on the disk than it may."""
        most_gib = self._tenants.configs[tenant].max_stored_gib
        stored = self._checkpoints.num_bytes(runs := [run.model_id for run in self._sessions.runs(tenant)])
        if most_gib and stored + num_bytes > most_gib * 2**30:
            oldest = ", ".join(one.path for one in self._checkpoints.checkpoints_of(*runs)[:3])
            raise DataError(f"the saved weights of this key take {stored / 2**30:.3g} GiB, and it has {most_gib:g} "
                            f"(max_stored_gib). Delete some with delete_checkpoint_from_tinker_path, the oldest are "
                            f"{oldest}; then save again, with ttl_seconds if they are needed for a while.")  # fmt: skip


def decoded(entry: Entry, body: bytes, facts: ClientFacts, max_rank: int) -> sdk.Call:
    """What a request asks for, by its kind. Raises `BadRequest`."""
    if entry.kind in ("forward", "forward_backward"):
        return sdk.forward_call(body, entry.content_type, backward=entry.kind == "forward_backward")
    asked = sdk.read(sdk.Body, body)
    match entry.kind:
        case "create_model":
            return sdk.adapter_spec(asked, max_rank, seed_of_client(facts.model_id))
        case "optim_step":
            return sdk.optim_call(asked)
        case "save_weights" | "save_weights_for_sampler":
            return sdk.save_call(asked, is_sampler=entry.kind == "save_weights_for_sampler")
        case "load_model" | "load_weights":
            return LoadCall(asked.need("path"), bool(asked.optimizer))
        case "save_weights_external":
            raise BadRequest("weights are not exported to other stores here: use save_weights_for_sampler.", "path")
    raise BadRequest(f"{entry.kind} is no request of a training client.")


def seed_of_client(model_id: str) -> int:
    """Seed of an adapter whose request has none: by its number in its session, the same whenever a loop runs."""
    return seed_of("adapter", model_id.rpartition(":")[2])


def _shape(spec: AdapterSpec) -> str:
    if spec.is_whole:
        return "all weights"
    flags = [name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(spec, name)]
    return f"rank {spec.rank} ({', '.join(flags)})"
