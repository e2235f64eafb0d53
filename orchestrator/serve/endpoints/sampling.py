"""Sampling sessions, and requests for samples."""

from starlette.responses import Response

from penstock.orchestrator.serve.checkpoints import Address
from penstock.orchestrator.serve.endpoints.exchange import Exchange, as_json
from penstock.orchestrator.serve.endpoints.training import base_model
from penstock.orchestrator.serve.request_log import Asked
from penstock.orchestrator.serve.samples import sampler_id
from penstock.orchestrator.serve.sessions import Sampler
from penstock.workers.gateway.http.errors import BadRequest


async def create_sampling_session(exchange: Exchange) -> Response:
    fields, service = exchange.fields, exchange.service
    session = service.sessions.live(exchange.tenant, fields.need_text("session_id"))
    number, path = fields.whole("sampling_session_seq_id", 0), fields.text("model_path") or ""
    if number is None:
        raise fields.wrong("sampling_session_seq_id", "is missing.")
    base_model(exchange, fields, needed=not path)
    if path:
        address = Address.parse(path)
        service.sessions.run(exchange.tenant, address.run)
        service.checkpoints.get(address)
    sampler = await service.sessions.add_sampler(
        Sampler(sampler_id(session.id, number), session.id, path, is_own=False)
    )
    return as_json({"type": "create_sampling_session", "sampling_session_id": sampler.id})


async def join_sampling_session(exchange: Exchange) -> Response:
    sampler = exchange.service.sessions.sampler(exchange.tenant, exchange.fields.need_text("sampling_session_id"))
    return as_json({"type": "join_sampling_session", "client_counter": await exchange.service.sessions.join(sampler)})


async def get_sampler(exchange: Exchange) -> Response:
    sampler = exchange.service.sessions.sampler(exchange.tenant, exchange.path("sampler"))
    run = sampler.path if sampler.is_own else sampler.path and Address.parse(sampler.path).run
    facts = exchange.service.sessions.facts.get(run)
    name = facts.base_model if facts is not None else exchange.service.backend.facts.name
    path = None if sampler.is_own else sampler.path or None
    return as_json({"sampler_id": sampler.id, "base_model": name, "model_path": path})


async def sample(exchange: Exchange) -> Response:
    fields, service = exchange.fields, exchange.service
    if "sampling_session_id" not in fields:
        raise fields.wrong("sampling_session_id", "is missing: make a sampling client first.")
    sampler = service.sessions.sampler(exchange.tenant, fields.need_text("sampling_session_id"))
    seq = fields.whole("seq_id", 0)
    if seq is None:
        raise fields.wrong("seq_id", "is missing.")
    try:
        request = service.samples.decoded(exchange.body, sampler, seq)
        num_samples = request.call.num_samples
    except BadRequest:
        request, num_samples = None, 1  # it fails in its turn
    await service.take_sample(sampler, Asked(seq, "sample", exchange.body), request)
    request_id = f"{sampler.id}:{seq}"
    return as_json({"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(num_samples)]})
