"""Requests of training clients: each is written down, and gets the id of its future."""

import asyncio
import contextlib
import time

from starlette.responses import Response

from penstock.orchestrator.serve.checkpoints import Address
from penstock.orchestrator.serve.endpoints.exchange import Endpoint, Exchange, as_json
from penstock.orchestrator.serve.endpoints.sessions import tokenizer_of
from penstock.orchestrator.serve.request_log import Asked
from penstock.orchestrator.serve.service import client_id
from penstock.orchestrator.serve.training_client import ClientFacts, TrainingClient, decoded, rank_of
from penstock.orchestrator.serve.wire import training
from penstock.orchestrator.serve.wire.training import Call, LoadCall
from penstock.workers.gateway.http.errors import BadRequest


def request(kind: str) -> Endpoint:
    """The endpoint of a numbered request."""

    async def taken(exchange: Exchange) -> Response:
        if kind == "load_weights" and exchange.numbered.session_id is not None:
            return await _create(exchange, "load_model")
        content_type = exchange.header("content-type")
        asked, identity = await asyncio.to_thread(training.numbered, exchange.body, content_type)
        client = exchange.service.client(exchange.tenant, asked.need("model_id"))
        return await _take(exchange, client, Asked(asked.need("seq_id"), kind, exchange.body, content_type, identity))

    return taken


async def create_model(exchange: Exchange) -> Response:
    return await _create(exchange, "create_model")


async def get_info(exchange: Exchange) -> Response:
    client = exchange.service.client(exchange.tenant, exchange.fields.need("model_id"))
    first = client.log.entries.get(0)
    if client.spec is None and first is not None and not first.is_done.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first.is_done.wait(), exchange.service.config.poll_s)
    spec, facts = await client.shape(), client.facts
    data = {"arch": None, "model_name": facts.base_model, "tokenizer_id": tokenizer_of(exchange.service)}
    return as_json({
        "type": "get_info", "model_data": data, "model_id": facts.model_id, "model_name": facts.base_model,
        "is_lora": not exchange.service.backend.facts.is_whole, "lora_rank": rank_of(spec),
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
    facts = ClientFacts(model_id, session.id, exchange.tenant, name, time.time(), given.user_metadata)
    asked = Asked(0, kind, exchange.body, exchange.header("content-type"))
    decoded(asked, exchange.body, facts, service.backend.facts.max_rank)  # refused at once: it is the first
    if kind == "load_model":
        address = Address.parse(given.need("path"))
        service.sessions.run(exchange.tenant, address.run)
        await asyncio.to_thread(service.checkpoints.get, address)
    return await _take(exchange, await service.create_client(facts), asked)


def base_model(exchange: Exchange, given: str | None, *, needed: bool) -> str:
    """The base model that a request names. There is one; if the server has a name for it, it must be that."""
    known = exchange.service.config.model_name
    if needed and given is None:
        raise BadRequest("is missing.", "base_model")
    if given is not None and known and given != known:
        raise BadRequest(f"{given[:100]!r} is not served here: the model is {known!r}.", "base_model")
    return given or known or exchange.service.backend.facts.name


async def _take(exchange: Exchange, client: TrainingClient, asked: Asked) -> Response:
    call: Call | None = None
    try:
        if asked.seq not in client.log.entries:
            max_rank = exchange.service.backend.facts.max_rank
            call = await asyncio.to_thread(decoded, asked, asked.body, client.facts, max_rank)
        if isinstance(call, LoadCall):
            Address.parse(call.path)
    except BadRequest:
        call = None  # it fails in its turn
    await exchange.service.accept(client, asked, call)
    model_id = client.facts.model_id
    return as_json({"request_id": f"{model_id}:{asked.seq}", "model_id": model_id})
