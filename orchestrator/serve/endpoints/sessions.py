"""What a client asks for at its start and while it lives: configuration, sessions, heartbeats."""

import time
from typing import Any

from starlette.responses import Response

from penstock.network.proxies import LOOPBACK
from penstock.orchestrator.serve.endpoints.exchange import Exchange, as_json, refused
from penstock.orchestrator.serve.service import Service
from penstock.orchestrator.serve.wire.messages import zstandard

CHUNK_BYTES, CHUNK_LENGTH = 5_000_000, 1024
"""Bytes and sequences at which the SDK cuts data into requests: its own defaults."""
REFRESH_S = 300


async def client_config(exchange: Exchange) -> Response:
    return as_json({
        "pjwt_auth_enabled": False,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": zstandard() is not None,
        "parallel_fwdbwd_chunks": True,
        "fwdbwd_max_chunk_len": CHUNK_LENGTH,
        "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
        "custom_loss_server_side": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "use_pyqwest_transport": False,
    })  # fmt: skip


async def dynamic_config(exchange: Exchange) -> Response:
    return as_json({"refresh_interval_sec": REFRESH_S, "sample_cancel_enabled": True})


async def health(exchange: Exchange) -> Response:
    trouble = exchange.service.trouble
    return refused(trouble, 503) if trouble else as_json({"status": "ok"})


async def telemetry(exchange: Exchange) -> Response:
    """Telemetry is thrown away."""
    return as_json({"status": "accepted"})


async def capabilities(exchange: Exchange) -> Response:
    facts = exchange.service.backend.facts
    model = {"model_name": facts.name, "max_context_length": facts.max_length, "trainable": True, "sampleable": True}
    return as_json({"supported_models": [model]})


async def create_session(exchange: Exchange) -> Response:
    asked, key = exchange.fields, exchange.header("x-idempotency-key")
    session = await exchange.service.sessions.create(
        exchange.tenant, key, time.time(), asked.user_metadata, asked.display_name
    )
    return as_json({"type": "create_session", "session_id": session.id})


async def heartbeat(exchange: Exchange) -> Response:
    session = exchange.service.sessions.live(exchange.tenant, exchange.fields.need("session_id"))
    session.last_seen = time.time()
    return as_json({"type": "session_heartbeat"})


async def finish_session(exchange: Exchange) -> Response:
    session = exchange.service.sessions.session(exchange.tenant, exchange.path("session"))
    await exchange.service.finish(session)
    return Response(status_code=204)


async def list_sessions(exchange: Exchange) -> Response:
    mine = [one for one in exchange.service.sessions.sessions.values() if one.tenant == exchange.tenant]
    mine.sort(key=lambda session: -session.created)
    return as_json({"sessions": [session.id for session in exchange.page(mine, 20)[0]]})


async def get_session(exchange: Exchange) -> Response:
    session = exchange.service.sessions.session(exchange.tenant, exchange.path("session"))
    return as_json({
        "training_run_ids": session.clients, "sampler_ids": list(session.samplers),
        "user_metadata": _texts(session.metadata), "display_name": session.display_name,
    })  # fmt: skip


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return {key: str(value) for key, value in metadata.items()} if metadata else None


def tokenizer_of(service: Service) -> str | None:
    """Where a client finds the tokenizer: in the model's directory, if it is on this machine; None: by the model's
    name."""
    return service.backend.facts.path if service.config.host in LOOPBACK else None
