"""Sampling sessions, and requests for samples."""

import asyncio

from starlette.responses import Response

from penstock.orchestrator.serve.checkpoints import Address
from penstock.orchestrator.serve.endpoints.exchange import Exchange, as_json
from penstock.orchestrator.serve.endpoints.training import base_model
from penstock.orchestrator.serve.request_log import Asked
from penstock.orchestrator.serve.samples import sampler_id
from penstock.orchestrator.serve.sessions import Sampler
from penstock.workers.gateway.http.errors import BadRequest


async def create_sampling_session(exchange: Exchange) -> Response:
    asked, service = exchange.fields, exchange.service
    session = service.sessions.live(exchange.tenant, asked.need("session_id"))
    path, save = asked.model_path or "", ""
    base_model(exchange, asked.base_model, needed=not path)
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
        num_samples = request.call.num_samples
    except BadRequest:
        request, num_samples = None, 1  # it fails in its turn
    await service.take_sample(sampler, Asked(seq, "sample", exchange.body), request)
    request_id = f"{sampler.id}:{seq}"
    return as_json({"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(num_samples)]})
