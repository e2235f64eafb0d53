"""Results: a client asks for one until it is there. A question is held up to `serve.poll_s`."""

import asyncio
import time

from starlette.responses import Response

from penstock.orchestrator.serve.endpoints.exchange import Exchange, as_json
from penstock.orchestrator.serve.request_log import Entry, RequestLog, ResultGone
from penstock.orchestrator.serve.samples import number_of
from penstock.orchestrator.serve.sessions import NotFound
from penstock.orchestrator.serve.training_client import TrainingClient
from penstock.workers.gateway.http.errors import BadRequest

LARGE_BYTES = 2**20
"""Size from which a result is announced first, to clients that want it so."""
ENDING_S = 1.0
"""Seconds that a question is held while the server ends."""


async def retrieve(exchange: Exchange) -> Response:
    asked = exchange.fields
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
        return "active", f"{service.samples.queue.num_running} requests for samples are under way"
    return "active", service.waits_for(client, entry)
