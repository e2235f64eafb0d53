"""The server over HTTP: how one request is answered, and what each path does.

The sender of a request is identified first, then its body is read, then parsed. A numbered request, of a training
client or a sampling session, is written to the journal and answered with the id of its future. The client polls for the
result; the server holds each poll up to `serve.poll_s`.

    401 no key, or an unknown one     403 not for this key     404 not there, or another tenant's
    410 a session or result is over   413 too large            422 what was sent cannot be taken
    429 too much of this key waits: the SDK sends the request again after Retry-After
    503 the disk is full, or the server ends: the SDK sends the request again for 5 minutes

The SDK raises 401, 403, 404, 413 and 422 at once. A request with a number is taken all the same where it can be, and
fails in its turn: its number would be missing in the order otherwise.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.metering import table
from penstock.network.host import LOOPBACK, names_loopback
from penstock.serve import sdk_messages as sdk
from penstock.serve.journal import Entry, Gone, JournalDamaged, JournalError, RequestLog, WrongNumber
from penstock.serve.samples import number_of, sampler_id
from penstock.serve.saved_weights import SCHEME, Checkpoint, NotFound, WeightsAddress, iso, read_spec
from penstock.serve.service import Refused, Service, client_id, metrics, status
from penstock.serve.sessions import Busy, ClientFacts, Sampler, Sessions
from penstock.serve.tenants import OPERATOR
from penstock.serve.training_clients import TrainingClient, decoded
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import AdapterSpec

_LOG = logging.getLogger("penstock")
BODY_S = 300.0
_STATUS: dict[type[PenstockError], int] = {
    Refused: 403, NotFound: 404, Gone: 410, JournalError: 503, Busy: 429, sdk.TooLarge: 413,
    BadRequest: 422, WrongNumber: 422, DataError: 422, ConfigError: 422, JournalDamaged: 422,
}  # fmt: skip
CLIENT_CONFIG: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "proto_write_fwdbwd": True,
    "proto_compress_fwdbwd": True,
    "parallel_fwdbwd_chunks": True,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "use_pyqwest_transport": False,
}
"""Settings of the SDK. It cuts data into requests at its own defaults."""
ARCHIVE_S = 900
"""Seconds for which the address of an archive is valid."""
_SECRET = secrets.token_bytes(32)
"""Signs addresses of archives, which are fetched without a key."""
MOST_KEY = 256
LARGE_BYTES = 2**20
"""Size from which a result is announced first, to clients that want it so."""
MOST_SAMPLERS = 2**16
"""Most sampling sessions of a session."""
ENDING_S = 1.0
"""Seconds that a poll is held while the server ends."""


Reply = Response | dict[str, Any] | None
"""A response, the values of one in JSON, or none (204)."""


@dataclass
class Exchange:
    """A request and its sender. The endpoints are its methods."""

    service: Service
    tenant: str
    """Its sender, or `OPERATOR`."""
    request: Request
    body: bytes = b""

    @property
    def sessions(self) -> Sessions:
        return self.service.sessions

    @property
    def fields(self) -> sdk.Body:
        """The fields of a body in JSON. Raises `BadRequest`."""
        return sdk.read(sdk.Body, self.body)

    @property
    def numbered(self) -> sdk.Numbered:
        return sdk.read(sdk.Numbered, self.body)

    def header(self, name: str) -> str:
        return self.request.headers.get(name, "")

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def address(self, path: str) -> WeightsAddress:
        """The address of a checkpoint of the tenant's. Raises `NotFound`."""
        address = WeightsAddress.parse(path)
        self.sessions.run(self.tenant, address.run)
        return address

    def page(self, values: list[Any], limit: int) -> tuple[list[Any], dict[str, int]]:
        """The part of a list that the query asks for, and its cursor."""
        first, num = self._number("offset", 0), min(1000, self._number("limit", limit))
        return values[first : first + num], {"offset": first, "limit": num, "total_count": len(values)}

    def _number(self, name: str, default: int) -> int:
        given = self.request.query_params.get(name, "")
        if given and not (given.isdecimal() and len(given) < 10):
            raise BadRequest(f"must be a whole number, not {given[:40]!r}.", name)
        return int(given or default)

    async def refuse(self, text: str, status: int = 422) -> Reply:
        return refused(f"{self.request.method} {self.request.url.path}: {text}", status)

    async def constant(self, **values: Any) -> Reply:
        return values

    async def health(self) -> Reply:
        trouble = self.service.trouble
        return refused(trouble, 503) if trouble else {"status": "ok"}

    async def capabilities(self) -> Reply:
        facts = self.service.backend.facts
        model = {"model_name": facts.name, "max_context_length": facts.max_length}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    async def create_session(self) -> Reply:
        asked, key = self.fields, self.header("x-idempotency-key")
        if len(key) > MOST_KEY:
            raise BadRequest(f"has more than {MOST_KEY} characters.", "X-Idempotency-Key")
        session = await self.sessions.create(self.tenant, key, time.time(), asked.metadata, asked.display_name)
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self) -> Reply:
        session = self.sessions.active_session(self.tenant, self.fields.need("session_id"))
        session.last_seen = time.time()
        return {"type": "session_heartbeat"}

    async def finish_session(self) -> None:
        session = self.sessions.session(self.tenant, self.path("session"))
        await self.service.finish(session)

    async def list_sessions(self) -> Reply:
        mine = [one for one in self.sessions.sessions.values() if one.tenant == self.tenant]
        mine.sort(key=lambda session: -session.created)
        return {"sessions": [session.id for session in self.page(mine, 20)[0]]}

    async def get_session(self) -> Reply:
        session = self.sessions.session(self.tenant, self.path("session"))
        return {
            "training_run_ids": session.clients, "sampler_ids": list(session.samplers),
            "user_metadata": _texts(session.metadata), "display_name": session.display_name,
        }  # fmt: skip

    async def list_runs(self) -> Reply:
        runs, cursor = self.page(self.sessions.runs(self.tenant), 20)
        shown = await asyncio.to_thread(lambda: [_run(self.service, run) for run in runs])
        return {"training_runs": shown, "cursor": cursor}

    async def get_run(self) -> Reply:
        run = self.sessions.run(self.tenant, self.path("run"))
        return await asyncio.to_thread(_run, self.service, run)

    async def list_checkpoints(self) -> Reply:
        """List those of one run, or a page of those of all runs, newest first."""
        sessions, name, cursor = self.sessions, self.request.path_params.get("run"), None
        runs = sessions.runs(self.tenant) if name is None else [sessions.run(self.tenant, name)]
        found = await asyncio.to_thread(self.service.checkpoints.checkpoints_of, *(run.model_id for run in runs))
        if name is None:
            found, cursor = self.page(found[::-1], 100)
        return {"checkpoints": [one.sdk_fields() for one in found], "cursor": cursor}

    async def delete_checkpoint(self) -> None:
        await self.service.delete_checkpoint(self._address())

    async def set_ttl(self) -> None:
        await asyncio.to_thread(self.service.checkpoints.expire, self._address(), self.fields.ttl_seconds)

    async def archive(self) -> Reply:
        """Redirect to the archive of a checkpoint, at an address that is valid for `ARCHIVE_S` without a key."""
        address = self._address()
        await asyncio.to_thread(self.service.checkpoints.get, address)
        until = int(time.time()) + ARCHIVE_S
        path = f"/archives/{until}/{_signature(address, until)}/{quote(address.run)}/{address.folder}/{address.name}"
        url = str(self.request.base_url).rstrip("/") + path
        return RedirectResponse(url, 302, {"expires": formatdate(until, usegmt=True)})

    async def weights_info(self) -> Reply:
        address = self.address(self.fields.need("tinker_path"))
        run = self.sessions.facts[address.run]
        spec = await asyncio.to_thread(lambda: read_spec(self.service.checkpoints.file(address)))
        return {
            "base_model": run.base_model, "is_lora": not spec.is_whole, "lora_rank": spec.rank or None,
            "train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn,
        }  # fmt: skip

    def _address(self) -> WeightsAddress:
        """The checkpoint that a path names, of a run of the tenant's."""
        return self.address(f"{SCHEME}{self.path('run')}/{self.path('checkpoint')}")

    async def take(self, kind: str) -> Reply:
        """Take a numbered request."""
        if kind == "load_weights" and self.numbered.session_id is not None:
            return await self.create("load_model")
        content_type = self.header("content-type")
        found, identity, tokens = await asyncio.to_thread(sdk.numbered, self.body, content_type)
        client = self.service.client(self.tenant, found.need("model_id"))
        return await self._accept(client, Entry(found.need("seq_id"), kind, content_type, tokens), identity)

    async def get_info(self) -> Reply:
        facts = self.service.client(self.tenant, self.fields.need("model_id")).facts
        model = self.service.backend.facts
        tokenizer = model.path if self.service.config.host in LOOPBACK else None  # in its directory, on this machine
        data = {"arch": None, "model_name": facts.base_model, "tokenizer_id": tokenizer}
        return {
            "type": "get_info", "model_data": data, "model_id": facts.model_id, "model_name": facts.base_model,
            "is_lora": not model.is_whole, "lora_rank": facts.rank,
        }  # fmt: skip

    async def unload(self) -> Reply:
        model_id = self.fields.need("model_id")
        self.sessions.run(self.tenant, model_id)
        if model_id in self.service.clients:
            await self.service.unload(self.service.clients[model_id])
        return {"request_id": f"{model_id}:unload", "model_id": model_id}

    async def create(self, kind: str) -> Reply:
        service, given = self.service, self.fields
        session = service.sessions.active_session(self.tenant, given.need("session_id"))
        name = self.base_model(given.base_model, needed=kind == "create_model")
        model_id = client_id(session.id, given.need("model_seq_id"))
        facts = ClientFacts(model_id, session.id, self.tenant, name, time.time(), given.metadata)
        entry = Entry(0, kind, self.header("content-type"))
        call = decoded(entry, self.body, facts, service.backend.facts.max_rank)  # refused at once: it is the first
        if isinstance(call, sdk.LoadCall):
            address = self.address(call.path)
            spec = await asyncio.to_thread(lambda: read_spec(service.checkpoints.file(address)))
        else:
            assert isinstance(call, AdapterSpec)
            spec = call
        client = await service.create_client(replace(facts, rank=spec.rank or None))
        return await self._accept(client, entry)

    def base_model(self, given: str | None, *, needed: bool) -> str:
        """The base model that a request names. There is one; if the server has a name for it, it must be that."""
        known = self.service.config.model_name
        if needed and given is None:
            raise BadRequest("is missing.", "base_model")
        if given is not None and known and given != known:
            raise BadRequest(f"{given[:100]!r} is not served here: the model is {known!r}.", "base_model")
        return given or known or self.service.backend.facts.name

    async def _accept(self, client: TrainingClient, entry: Entry, identity: bytes = b"") -> Reply:
        await self.service.accept(client, entry, self.body, identity)
        return {"request_id": f"{client.facts.model_id}:{entry.seq}", "model_id": client.facts.model_id}

    async def create_sampling_session(self) -> Reply:
        asked, service = self.fields, self.service
        session = service.sessions.active_session(self.tenant, asked.need("session_id"))
        path, save = asked.model_path or "", ""
        self.base_model(asked.base_model, needed=not path)
        if len(session.samplers) >= MOST_SAMPLERS:
            raise Refused(f"this session has {MOST_SAMPLERS:,} sampling sessions: make a new ServiceClient.")
        if path:
            save = service.checkpoints.get(self.address(path)).save
        name = sampler_id(session.id, asked.need("sampling_session_seq_id"))
        await service.sessions.add_sampler(Sampler(name, session.id, path, False, save))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def join_sampling_session(self) -> Reply:
        sampler = self.sessions.sampler(self.tenant, self.fields.need("sampling_session_id"))
        return {"type": "join_sampling_session", "client_counter": await self.sessions.join(sampler)}

    async def get_sampler(self) -> Reply:
        sampler = self.sessions.sampler(self.tenant, self.path("sampler"))
        run = sampler.path if sampler.is_own else sampler.path and WeightsAddress.parse(sampler.path).run
        facts = self.sessions.facts.get(run)
        name = facts.base_model if facts is not None else self.service.backend.facts.name
        path = None if sampler.is_own else sampler.path or None
        return {"sampler_id": sampler.id, "base_model": name, "model_path": path}

    async def sample(self) -> Reply:
        asked, service = self.numbered, self.service
        sampler, seq = service.sessions.sampler(self.tenant, asked.need("sampling_session_id")), asked.need("seq_id")
        tokens = num_samples = 1  # of a request that fails in its turn
        with contextlib.suppress(BadRequest):
            call = (await asyncio.to_thread(service.samples.decoded, self.body, sampler, seq)).call
            num_samples = call.num_samples
            tokens = len(call.prompt_ids) + num_samples * call.sampling.max_tokens  # at most
        admit = partial(service.admit, sampler.session_id)
        await service.samples.take(sampler, Entry(seq, "sample", tokens=tokens), self.body, admit)
        request_id = f"{sampler.id}:{seq}"
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(num_samples)]}

    async def retrieve(self) -> Reply:
        asked, self.body = self.fields, b""  # frees it while the poll is held
        request_id = asked.need("request_id")
        if request_id.endswith(":unload"):
            facts = self.sessions.run(self.tenant, request_id.removesuffix(":unload"))
            return {"model_id": facts.model_id, "type": "unload_model"}
        log, entry, client = self._find_request(request_id)
        if not entry.is_done.is_set():
            await self._wait_for(entry)
        answer = await asyncio.to_thread(log.answer_of, entry) if entry.is_done.is_set() else None
        if answer is None:
            state, reason = self._queue_state(entry, client)
            return {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason}
        size = len(answer.body)
        if asked.allow_metadata_only and size > LARGE_BYTES and not answer.is_failure:
            return {"status": "complete_metadata", "response_payload_size": size, "request_id": request_id}
        return Response(answer.body, media_type=sdk.PROTOBUF if answer.message else sdk.JSON)

    async def cancel(self) -> None:
        request_id = self.fields.need("request_id")
        log, entry, client = self._find_request(request_id)
        if client is not None:
            raise BadRequest("a request that trains cannot be cancelled: the ones after it count on it.", "request_id")
        await self.service.samples.queue.cancel(request_id.rpartition(":")[0], entry.seq, log)

    def _find_request(self, request_id: str) -> tuple[RequestLog, Entry, TrainingClient | None]:
        """A request by its id. Raises `NotFound`, `Gone`."""
        owner, _, number = request_id.rpartition(":")
        if not number.isdecimal():
            raise NotFound(f"{request_id[:200]!r} is no request.")
        client, seq = None, int(number)
        if ":train:" in owner:
            client = self.service.client(self.tenant, owner)
            log, is_past = client.log, seq < client.next_seq
        else:
            sampler = self.sessions.sampler(self.tenant, owner)
            seq = number_of(sampler, seq)
            found = self.service.samples.log_of(self.sessions.sessions[sampler.session_id])
            if found is None:
                raise NotFound(f"{request_id}: there is no such request.")
            log, is_past = found, True
        entry = log.entries.get(seq)
        if entry is None and is_past:
            raise Gone(f"{request_id}: its result is kept no longer (serve.keep_results).")
        if entry is None:
            raise NotFound(f"{request_id}: there is no such request.")
        return log, entry, client

    async def _wait_for(self, entry: Entry) -> None:
        """Wait until a request is done, for `serve.poll_s` at most."""
        service = self.service
        ends = [asyncio.ensure_future(one.wait()) for one in (entry.is_done, service.is_ending)]
        try:
            await asyncio.wait(ends, timeout=service.config.poll_s, return_when=asyncio.FIRST_COMPLETED)
            if not entry.is_done.is_set() and service.is_ending.is_set():
                await asyncio.wait(ends[:1], timeout=ENDING_S)
        finally:
            for end in ends:
                end.cancel()

    def _queue_state(self, entry: Entry, client: TrainingClient | None) -> tuple[str, str]:
        """What a request waits for: the state that the SDK knows, and a sentence."""
        service, now = self.service, time.monotonic()
        opens_in = service.samples.schedule.opens_in(self.tenant, now)
        if opens_in > 0:
            return "paused_rate_limit", f"tokens_per_minute of this key are used up; more in {opens_in:.0f} s"
        if client is None:
            num_running = service.samples.queue.num_running
            return "active", service.trouble or f"{num_running} requests for samples are under way"
        return "active", service.waits_for(client, entry)

    async def metrics(self) -> Reply:
        return PlainTextResponse(metrics(self.service, self.tenant))

    async def status(self) -> Reply:
        return status(self.service, self.tenant)


Endpoint = Callable[[Exchange], Awaitable[Reply]]
Handler = Callable[[Request], Awaitable[Response]]


def refused(text: str, status: int) -> Response:
    """A response that the SDK raises with this text, or retries after 429. 401 and 403 close the connection."""
    body = {"error": text, "detail": text, "category": "user" if status < 500 else "server"}
    headers = {401: {"connection": "close"}, 403: {"connection": "close"}, 429: {"retry-after": "1"}}
    return JSONResponse(body, status, headers.get(status))


def response_of(reply: Reply) -> Response:
    return reply if isinstance(reply, Response) else Response(status_code=204) if reply is None else JSONResponse(reply)


def answering(service: Service, endpoint: Endpoint, *, has_data: bool = False, for_operator: bool = False) -> Handler:
    """The handler of an endpoint. `has_data`: its requests may be as large as `serve.max_body_mib`. `for_operator`: the
    operator may use it, too."""
    limit_bytes = service.config.max_body_mib * 2**20 if has_data else sdk.PLAIN_BYTES

    async def answer(request: Request) -> Response:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if _is_foreign(request, service.config.host):
            return refused("this server is for programs that know its address, not for pages of other sites.", 403)
        tenant = service.tenants.tenant_of(key)
        if tenant is None:
            return refused("a key is needed: set TINKER_API_KEY to the one that the server's operator gave you.", 401)
        if tenant == OPERATOR and not for_operator:
            return refused("this key is the operator's: clients have keys of their own (serve.tenants).", 403)
        exchange = Exchange(service, tenant, request)
        try:
            if request.method in ("POST", "PUT"):
                async with asyncio.timeout(BODY_S) as patience, service.tenants.bodies[tenant][has_data]:
                    packed = await _read(request, limit_bytes)
                    patience.reschedule(None)
                    encoding = request.headers.get("content-encoding", "")
                    exchange.body = await asyncio.to_thread(sdk.decompress, packed, encoding, limit_bytes)
                    if has_data:
                        return response_of(await endpoint(exchange))
            return response_of(await endpoint(exchange))
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return refused(f"the body did not come within {BODY_S:g} s.", 408)
        except PenstockError as error:
            status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
            if status == 429:
                service.tenants.meters.add(table.SERVE_REFUSED, tenant=tenant)
            return refused(str(error), status)
        except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
            _LOG.exception("%s %s", request.method, request.url.path)
            return refused(f"{type(error).__name__}: {error}", 500)

    return answer


def _is_foreign(request: Request, interface: str) -> bool:
    """Return whether a page of another site has a browser send this: it names another origin, or, by DNS rebinding,
    another host than loopback."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    is_rebound = interface in LOOPBACK and not names_loopback(host)
    return is_rebound or (origin is not None and origin.partition("://")[2] != host)


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, as it was sent. Raises `TooLarge` as soon as it is."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        sdk.check_size(num_bytes, limit_bytes)
        parts.append(part)
    return b"".join(parts)


async def download(service: Service, request: Request) -> Response:
    """The archive itself, a tar."""
    values = request.path_params
    try:
        address, until = WeightsAddress(values["run"], values["folder"], values["name"]), int(values["until"])
        is_good = hmac.compare_digest(values["signature"], _signature(address, until)) and until >= time.time()
        if not is_good:
            return refused("this address of an archive has expired: ask for a new one.", 403)
        await asyncio.to_thread(service.checkpoints.get, address)
    except (ValueError, NotFound) as error:
        return refused(str(error), 403)
    return StreamingResponse(service.checkpoints.archive(address), media_type="application/x-tar")


def _run(service: Service, run: ClientFacts) -> dict[str, Any]:
    found = service.checkpoints.checkpoints_of(run.model_id)
    return {
        "training_run_id": run.model_id, "base_model": run.base_model, "model_owner": run.tenant,
        "is_lora": not service.backend.facts.is_whole, "lora_rank": run.rank,
        "corrupted": False,
        "last_request_time": iso(max([run.created, *(one.time for one in found)])),
        "last_checkpoint": _last(found, "weights"), "last_sampler_checkpoint": _last(found, "sampler_weights"),
        "user_metadata": _texts(run.metadata),
    }  # fmt: skip


def _last(found: list[Checkpoint], folder: str) -> dict[str, Any] | None:
    return next((one.sdk_fields() for one in reversed(found) if one.folder == folder), None)


def _signature(address: WeightsAddress, until: int) -> str:
    return hmac.new(_SECRET, f"{until}/{address.path}".encode(), hashlib.sha256).hexdigest()


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return {key: str(value) for key, value in metadata.items()} if metadata else None


API = "/api/v1"
METHODS = ["GET", "POST", "PUT", "DELETE"]
NUMBERED = (
    "forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights",
    "save_weights_external",
)  # fmt: skip
WITH_DATA = ("forward", "forward_backward", "asample")
"""Endpoints whose requests may be large."""
ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("GET", "healthz"): Exchange.health,
    ("POST", "client/config"): partial(Exchange.constant, **CLIENT_CONFIG),
    ("POST", "client/dynamic_config"): partial(Exchange.constant, refresh_interval_sec=300, sample_cancel_enabled=True),
    ("POST", "telemetry"): partial(Exchange.constant, status="accepted"),  # and dropped
    ("GET", "get_server_capabilities"): Exchange.capabilities,
    ("POST", "create_session"): Exchange.create_session,
    ("POST", "session_heartbeat"): Exchange.heartbeat,
    ("POST", "sessions/{session}/finish"): Exchange.finish_session,
    ("GET", "sessions"): Exchange.list_sessions,
    ("GET", "sessions/{session}"): Exchange.get_session,
    ("POST", "create_model"): partial(Exchange.create, kind="create_model"),
    ("POST", "get_info"): Exchange.get_info,
    ("POST", "unload_model"): Exchange.unload,
    **{("POST", kind): partial(Exchange.take, kind=kind) for kind in NUMBERED},
    ("POST", "create_sampling_session"): Exchange.create_sampling_session,
    ("POST", "join_sampling_session"): Exchange.join_sampling_session,
    ("GET", "samplers/{sampler}"): Exchange.get_sampler,
    ("POST", "asample"): Exchange.sample,
    ("POST", "retrieve_future"): Exchange.retrieve,
    ("POST", "cancel_future"): Exchange.cancel,
    ("GET", "training_runs"): Exchange.list_runs,
    ("GET", "training_runs/{run}"): Exchange.get_run,
    ("GET", "training_runs/{run}/checkpoints"): Exchange.list_checkpoints,
    ("GET", "checkpoints"): Exchange.list_checkpoints,
    ("GET", "training_runs/{run}/checkpoints/{checkpoint:path}/archive"): Exchange.archive,
    ("PUT", "training_runs/{run}/checkpoints/{checkpoint:path}/ttl"): Exchange.set_ttl,
    ("DELETE", "training_runs/{run}/checkpoints/{checkpoint:path}"): Exchange.delete_checkpoint,
    ("POST", "weights_info"): Exchange.weights_info,
}
_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
REFUSED = {
    "auth/token": "keys are used as they are here: no token is given for one.",
    "auth/apikey/me": "keys are in the server's configuration (serve.tenants): set TINKER_API_KEY.",
    "create_custom_loss": "custom losses run in the client here: use forward_backward_custom.",
    "copy_weights": "weights are not copied between projects here: there are none.",
    "sessions/{session}/project": "there are no projects here.",
    "sessions/{session}/trace_export": "traces are not exported here.",
    "sessions/search": "sessions are not searched here: list them.",
    "audit": "there is no audit log here.",
    "billing/{path:path}": "nothing is billed here: /metrics has what was used.",
    f"{_CHECKPOINT}/publish": "checkpoints are their tenant's alone here, and not published: send an archive.",
    f"{_CHECKPOINT}/external_weights_urls": "weights are not exported here: use the archive of sampler weights.",
}


def routes(service: Service) -> list[Route]:
    """All routes; the more special ones first."""
    refusing = [_route(service, METHODS, path, partial(Exchange.refuse, text=text)) for path, text in REFUSED.items()]
    done = [_route(service, [method], path, endpoint) for (method, path), endpoint in ENDPOINTS.items()]
    own = [
        Route("/metrics", answering(service, Exchange.metrics, for_operator=True)),
        Route("/status", answering(service, Exchange.status, for_operator=True)),
        Route("/archives/{until}/{signature}/{run}/{folder}/{name}", partial(download, service)),
    ]
    unknown = answering(service, partial(Exchange.refuse, text="is not done here.", status=404))
    return [*refusing, *done, *own, Route("/{path:path}", unknown, methods=METHODS)]


def _route(service: Service, methods: list[str], path: str, endpoint: Endpoint) -> Route:
    return Route(f"{API}/{path}", answering(service, endpoint, has_data=path in WITH_DATA), methods=methods)
