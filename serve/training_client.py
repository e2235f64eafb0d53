"""A training client: an adapter, and the requests for it in the order of their numbers.

Requests are numbered from 1 without gaps; the one that makes the adapter is 0. They may come in any order, and are
carried out strictly in theirs. The adapter's state is on the ranks, or goes on from here:

    snapshot-N.safetensors   the state after request N
    requests.journal         all later requests, which are repeated on it
    results.journal          what was told of them

A result is on the disk before a snapshot that has its request in it, so no request is ever repeated on a state that has
seen it.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.orchestrator.loops.verbs import seed_of
from penstock.serve import sdk_messages as sdk
from penstock.serve.checkpoints import read_state, write_state
from penstock.serve.request_log import Asked, Entry, RequestLog, WrongNumber
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import AdapterSpec, AdapterState

_LOG = logging.getLogger("penstock")
CHANGING = ("create_model", "load_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests after which an adapter is another one."""


@dataclass(frozen=True)
class ClientFacts:
    """What a training client is made with."""

    model_id: str
    session_id: str
    tenant: str
    base_model: str
    created: float
    metadata: dict[str, Any] | None = None
    rank: int | None = None
    """Rank of the adapter; None: all weights are trained, or the version before has made it."""


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
        found = sorted((_seq_of(file), file) for file in directory.glob("snapshot-*.safetensors"))
        self._snapshot: Path | None = found[-1][1] if found else None
        self.snapshot_seq = found[-1][0] if found else -1
        for _, file in found[:-1]:
            file.unlink(missing_ok=True)
        self.spec: AdapterSpec | None = None
        """The adapter's shape; None while it is not made."""
        self._writing: asyncio.Task[None] | None = None

    async def accept(self, asked: Asked) -> Entry:
        """Take a request, or recognise one that was taken. Raises `WrongNumber`, `JournalError`."""
        if asked.seq < self.next_seq and asked.seq not in self.log.entries:
            raise WrongNumber(
                f"request {asked.seq} of {self.facts.model_id} comes too late: {self.next_seq} is the next. Make a new "
                "training client from the last checkpoint."
            )
        return await self.log.accept(asked)

    @property
    def next(self) -> Entry | None:
        """The request whose turn it is, if it has come."""
        entry = self.log.entries.get(self.next_seq)
        return entry if entry is not None and entry.is_durable.is_set() and not entry.is_done.is_set() else None

    @property
    def gap(self) -> int | None:
        """Number of the request that others wait for and that has not come."""
        is_missing = self.next_seq not in self.log.entries and self.next_seq < self.log.highest_taken
        return self.next_seq if is_missing else None

    @property
    def num_waiting(self) -> int:
        return len(self.log.waiting)

    def call_of(self, entry: Entry) -> sdk.Call:
        """What a request asks for, from any thread. Raises `BadRequest`."""
        return decoded(entry, self.log.body_of(entry), self.facts, self._max_rank)

    def finish(self) -> None:
        """Go on to the request after the one that was answered."""
        self.pause_s, self.trouble = 0.0, ""
        self.next_seq = self.log.highest_answered + 1

    def repeated(self) -> list[Entry]:
        """Requests that have to be repeated on the newest snapshot, in order."""
        later = [one for one in self.log.entries.values() if self.snapshot_seq < one.seq < self.next_seq]
        return sorted((one for one in later if one.kind in CHANGING and not one.is_failure), key=lambda one: one.seq)

    @property
    def has_failed(self) -> bool:
        """Whether the adapter could not be made."""
        first = self.log.entries.get(0)
        return first is not None and first.is_failure

    async def newest(self) -> AdapterState | None:
        """The newest snapshot; None before the first one. Raises `DataError`."""
        await self.settled()
        if self._snapshot is None:
            return None
        state = await asyncio.to_thread(read_state, self._snapshot)
        self.spec = state.spec
        return state

    async def keep(self, state: AdapterState, seq: int) -> None:
        """Write the state after request `seq` as a snapshot, beside what goes on. What came before is dropped."""
        await self.settled()
        self._writing = asyncio.create_task(self._keep(state, seq))

    async def settled(self) -> None:
        """Wait until no snapshot is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def close(self) -> None:
        await self.settled()
        await self.log.close()

    async def _keep(self, state: AdapterState, seq: int) -> None:
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
        is_first = entry.seq == 0
        return entry.seq > self.snapshot_seq and (is_first or (entry.kind in CHANGING and not entry.is_failure))


def decoded(entry: Entry | Asked, body: bytes, facts: ClientFacts, max_rank: int) -> sdk.Call:
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
            return sdk.load_call(asked)
        case "save_weights_external":
            raise BadRequest("weights are not exported to other stores here: use save_weights_for_sampler.", "path")
    raise BadRequest(f"{entry.kind} is no request of a training client.")


def seed_of_client(model_id: str) -> int:
    """Seed of an adapter whose request has none: by its number in its session, so a loop that runs again begins with
    the same adapter."""
    return seed_of("adapter", model_id.rpartition(":")[2])


def _seq_of(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])
