"""Requests with numbers, of training clients and sampling sessions: each is written down, and gets the id of its
future. A client asks for the result until it is there; a question is held up to `serve.poll_s`."""

import asyncio
import time
from dataclasses import replace

from starlette.responses import Response

from penstock.serve.checkpoints import Address, read_spec
from penstock.serve.endpoints.exchange import Endpoint, Exchange, as_json
from penstock.serve.endpoints.sessions import tokenizer_of
from penstock.serve.request_log import Asked, Entry, RequestLog, ResultGone
from penstock.serve.samples import number_of, sampler_id
from penstock.serve.service import Refused, client_id
from penstock.serve.sessions import NotFound, Sampler
from penstock.serve.training_client import ClientFacts, TrainingClient, decoded
from penstock.serve.wire import requests
from penstock.serve.wire.requests import LoadCall
from penstock.workers.calls.training_calls import AdapterSpec
from penstock.workers.gateway.http.errors import BadRequest

LARGE_BYTES = 2**20
"""Size from which a result is announced first, to clients that want it so."""
MOST_SAMPLERS = 2**16
"""Most sampling sessions of a session."""
ENDING_S = 1.0
"""Seconds that a question is held while the server ends."""


def request(kind: str) -> Endpoint:
    """The endpoint of a numbered request."""

    async def taken(exchange: Exchange) -> Response:
        if kind == "load_weights" and exchange.numbered.session_id is not None:
            return await _create(exchange, "load_model")
        content_type = exchange.header("content-type")
        found, identity, tokens = await asyncio.to_thread(requests.numbered, exchange.body, content_type)
        client = exchange.service.client(exchange.tenant, found.need("model_id"))
        asked = Asked(found.need("seq_id"), kind, exchange.body, content_type, identity, tokens)
        return await _take(exchange, client, asked)

    return taken


async def create_model(exchange: Exchange) -> Response:
    return await _create(exchange, "create_model")


async def get_info(exchange: Exchange) -> Response:
    facts = exchange.service.client(exchange.tenant, exchange.fields.need("model_id")).facts
    data = {"arch": None, "model_name": facts.base_model, "tokenizer_id": tokenizer_of(exchange.service)}
    return as_json({
        "type": "get_info", "model_data": data, "model_id": facts.model_id, "model_name": facts.base_model,
        "is_lora": not exchange.service.backend.facts.is_whole, "lora_rank": facts.rank,
    })  # fmt: skip


async def unload(exchange: Exchange) -> Response:
    model_id = exchange.fields.need("model_id")
    exchange.service.sessions.run(exchange.tenant, model_id)
    if model_id in exchange.service.clients:
        await exchange.service.unload(exchange.service.clients[model_id])
    return as_json({"request_id": f"{model_id}:unload", "model_id": model_id})


async def _create(exchange: Exchange, kind: str) -> Response:
    service, given = exchange.service, exchange.fields
    session = service.sessions.live(exchange.tenant, given.need("session_id"))
    name = base_model(exchange, given.base_model, needed=kind == "create_model")
    model_id = client_id(session.id, given.need("model_seq_id"))
    facts = ClientFacts(model_id, session.id, exchange.tenant, name, time.time(), given.metadata)
    asked = Asked(0, kind, exchange.body, exchange.header("content-type"))
    call = decoded(asked, exchange.body, facts, service.backend.facts.max_rank)  # refused at once: it is the first
    if isinstance(call, LoadCall):
        address = Address.parse(call.path)
        service.sessions.run(exchange.tenant, address.run)
        spec = await asyncio.to_thread(lambda: read_spec(service.checkpoints.file(address)))
    else:
        assert isinstance(call, AdapterSpec)
        spec = call
    client = await service.create_client(replace(facts, rank=spec.rank or None))
    return await _take(exchange, client, asked)


def base_model(exchange: Exchange, given: str | None, *, needed: bool) -> str:
    """The base model that a request names. There is one; if the server has a name for it, it must be that."""
    known = exchange.service.config.model_name
    if needed and given is None:
        raise BadRequest("is missing.", "base_model")
    if given is not None and known and given != known:
        raise BadRequest(f"{given[:100]!r} is not served here: the model is {known!r}.", "base_model")
    return given or known or exchange.service.backend.facts.name


async def _take(exchange: Exchange, client: TrainingClient, asked: Asked) -> Response:
    await exchange.service.accept(client, asked)
    model_id = client.facts.model_id
    return as_json({"request_id": f"{model_id}:{asked.seq}", "model_id": model_id})


async def create_sampling_session(exchange: Exchange) -> Response:
    asked, service = exchange.fields, exchange.service
    session = service.sessions.live(exchange.tenant, asked.need("session_id"))
    path, save = asked.model_path or "", ""
    base_model(exchange, asked.base_model, needed=not path)
    if len(session.samplers) >= MOST_SAMPLERS:
        raise Refused(f"this session has {MOST_SAMPLERS:,} sampling sessions: make a new ServiceClient.")
    if path:
        address = Address.parse(path)
        service.sessions.run(exchange.tenant, address.run)
        save = service.checkpoints.get(address).save
    sampler = await service.sessions.add_sampler(
        Sampler(sampler_id(session.id, asked.need("sampling_session_seq_id")), session.id, path, False, save)
    )
    return as_json({"type": "create_sampling_session", "sampling_session_id": sampler.id})


async def join_sampling_session(exchange: Exchange) -> Response:
    sampler = exchange.service.sessions.sampler(exchange.tenant, exchange.fields.need("sampling_session_id"))
    return as_json({"type": "join_sampling_session", "client_counter": await exchange.service.sessions.join(sampler)})


async def get_sampler(exchange: Exchange) -> Response:
    sampler = exchange.service.sessions.sampler(exchange.tenant, exchange.path("sampler"))
    run = sampler.path if sampler.is_own else sampler.path and Address.parse(sampler.path).run
    facts = exchange.service.sessions.facts.get(run)
    name = facts.base_model if facts is not None else exchange.service.backend.facts.name
    path = None if sampler.is_own else sampler.path or None
    return as_json({"sampler_id": sampler.id, "base_model": name, "model_path": path})


async def sample(exchange: Exchange) -> Response:
    asked, service = exchange.numbered, exchange.service
    sampler, seq = service.sessions.sampler(exchange.tenant, asked.need("sampling_session_id")), asked.need("seq_id")
    try:
        request = await asyncio.to_thread(service.samples.decoded, exchange.body, sampler, seq)
        tokens, num_samples = request.num_tokens, request.call.num_samples
    except BadRequest:
        tokens, num_samples = 1, 1  # it fails in its turn
    await service.take_sample(sampler, Asked(seq, "sample", exchange.body, tokens=tokens))
    request_id = f"{sampler.id}:{seq}"
    return as_json({"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(num_samples)]})


async def retrieve(exchange: Exchange) -> Response:
    asked, exchange.body = exchange.fields, b""  # which waits with the question
    request_id = asked.need("request_id")
    if request_id.endswith(":unload"):
        facts = exchange.service.sessions.run(exchange.tenant, request_id.removesuffix(":unload"))
        return as_json({"model_id": facts.model_id, "type": "unload_model"})
    log, entry, client = _found(exchange, request_id)
    if not entry.is_done.is_set():
        await _held(exchange, entry)
    answer = await asyncio.to_thread(log.answer_of, entry) if entry.is_done.is_set() else None
    if answer is None:
        state, reason = _why(exchange, entry, client)
        told = {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason}
        return as_json(told)
    size = len(answer.body)
    if asked.allow_metadata_only and size > LARGE_BYTES and not answer.is_failure:
        return as_json({"status": "complete_metadata", "response_payload_size": size, "request_id": request_id})
    return Response(answer.body, media_type=answer.content_type)


async def cancel(exchange: Exchange) -> Response:
    request_id = exchange.fields.need("request_id")
    log, entry, client = _found(exchange, request_id)
    if client is not None:
        raise BadRequest("a request that trains cannot be cancelled: the ones after it count on it.", "request_id")
    await exchange.service.samples.queue.cancel(request_id.rpartition(":")[0], entry.seq, log)
    return Response(status_code=204)


def _found(exchange: Exchange, request_id: str) -> tuple[RequestLog, Entry, TrainingClient | None]:
    """A request by its id. Raises `NotFound`, `ResultGone`."""
    owner, _, number = request_id.rpartition(":")
    if not number.isdecimal():
        raise NotFound(f"{request_id[:200]!r} is no request.")
    client, seq = None, int(number)
    if ":train:" in owner:
        client = exchange.service.client(exchange.tenant, owner)
        log, is_past = client.log, seq < client.next_seq
    else:
        sampler = exchange.service.sessions.sampler(exchange.tenant, owner)
        seq = number_of(sampler, seq)
        found = exchange.service.samples.log_of(exchange.service.sessions.sessions[sampler.session_id])
        if found is None:
            raise NotFound(f"{request_id}: there is no such request.")
        log, is_past = found, True
    entry = log.entries.get(seq)
    if entry is None and is_past:
        raise ResultGone(f"{request_id}: its result is kept no longer (serve.keep_results).")
    if entry is None:
        raise NotFound(f"{request_id}: there is no such request.")
    return log, entry, client


async def _held(exchange: Exchange, entry: Entry) -> None:
    """Wait until a request is done, at most as long as a question is held."""
    service = exchange.service
    ends = [asyncio.ensure_future(one.wait()) for one in (entry.is_done, service.is_ending)]
    try:
        await asyncio.wait(ends, timeout=service.config.poll_s, return_when=asyncio.FIRST_COMPLETED)
        if not entry.is_done.is_set() and service.is_ending.is_set():
            await asyncio.wait(ends[:1], timeout=ENDING_S)
    finally:
        for end in ends:
            end.cancel()


def _why(exchange: Exchange, entry: Entry, client: TrainingClient | None) -> tuple[str, str]:
    """What a request waits for: the state that the SDK knows, and a sentence."""
    service, now = exchange.service, time.monotonic()
    opens_in = service.samples.schedule.opens_in(exchange.tenant, now)
    if opens_in > 0:
        return "paused_rate_limit", f"tokens_per_minute of this key are used up; more in {opens_in:.0f} s"
    if client is None:
        return "active", service.trouble or f"{service.samples.queue.num_running} requests for samples are under way"
    return "active", service.waits_for(client, entry)
