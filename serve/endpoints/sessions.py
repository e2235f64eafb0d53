"""What a client asks for at its start and while it lives, and about what it has made: configuration, sessions and
heartbeats; training runs and checkpoints, with their lifetimes and archives."""

import asyncio
import hashlib
import hmac
import secrets
import time
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from penstock.network.proxies import LOOPBACK
from penstock.serve.checkpoints import Address, Checkpoint, NoCheckpoint, iso, read_spec
from penstock.serve.endpoints.exchange import Exchange, as_json, refused
from penstock.serve.service import Service
from penstock.serve.training_client import ClientFacts
from penstock.workers.gateway.http.errors import BadRequest

CHUNK_BYTES, CHUNK_LENGTH = 5_000_000, 1024
"""Bytes and sequences at which the SDK cuts data into requests: its own defaults."""
REFRESH_S = 300
ARCHIVE_S = 900
"""Seconds for which the address of an archive is good."""
_SECRET = secrets.token_bytes(32)
"""Signs addresses of archives, which are fetched without a key."""
MOST_KEY = 256


async def client_config(exchange: Exchange) -> Response:
    return as_json({
        "pjwt_auth_enabled": False,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": True,
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
    if len(key) > MOST_KEY:
        raise BadRequest(f"has more than {MOST_KEY} characters.", "X-Idempotency-Key")
    session = await exchange.service.sessions.create(
        exchange.tenant, key, time.time(), asked.metadata, asked.display_name
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


async def list_runs(exchange: Exchange) -> Response:
    runs, cursor = exchange.page(exchange.service.sessions.runs(exchange.tenant), 20)
    told = await asyncio.to_thread(lambda: [_run(exchange.service, run) for run in runs])
    return as_json({"training_runs": told, "cursor": cursor})


async def get_run(exchange: Exchange) -> Response:
    run = exchange.service.sessions.run(exchange.tenant, exchange.path("run"))
    return as_json(await asyncio.to_thread(_run, exchange.service, run))


async def list_checkpoints(exchange: Exchange) -> Response:
    """Those of one run, or of all of them, a page of which is told."""
    service, name = exchange.service, exchange.request.path_params.get("run")
    if name is not None:
        run = service.sessions.run(exchange.tenant, name)
        found = await asyncio.to_thread(service.checkpoints.of_run, run.model_id)
        return as_json({"checkpoints": [one.told() for one in found], "cursor": None})
    runs = service.sessions.runs(exchange.tenant)
    everything = await asyncio.to_thread(
        lambda: [one for run in runs for one in service.checkpoints.of_run(run.model_id)]
    )
    everything.sort(key=lambda one: -one.time)
    found, cursor = exchange.page(everything, 100)
    return as_json({"checkpoints": [one.told() for one in found], "cursor": cursor})


async def delete_checkpoint(exchange: Exchange) -> Response:
    await exchange.service.delete_checkpoint(_address(exchange))
    return Response(status_code=204)


async def set_ttl(exchange: Exchange) -> Response:
    ttl_s = exchange.fields.ttl_seconds
    await asyncio.to_thread(exchange.service.checkpoints.expire, _address(exchange), ttl_s)
    return Response(status_code=204)


async def archive(exchange: Exchange) -> Response:
    """Where the archive of a checkpoint is: an address that is good for a while, without a key."""
    address = _address(exchange)
    await asyncio.to_thread(exchange.service.checkpoints.get, address)
    until = int(time.time()) + ARCHIVE_S
    path = f"/archives/{until}/{_signature(address, until)}/{quote(address.run)}/{address.folder}/{address.name}"
    url = str(exchange.request.base_url).rstrip("/") + path
    return RedirectResponse(url, 302, {"expires": formatdate(until, usegmt=True)})


async def download(service: Service, request: Request) -> Response:
    """The archive itself, a tar."""
    values = request.path_params
    try:
        address, until = Address(values["run"], values["folder"], values["name"]), int(values["until"])
        is_good = hmac.compare_digest(values["signature"], _signature(address, until)) and until >= time.time()
        if not is_good:
            return refused("this address of an archive is good no longer: ask for a new one.", 403)
        await asyncio.to_thread(service.checkpoints.get, address)
    except (ValueError, NoCheckpoint) as error:
        return refused(str(error), 403)
    return StreamingResponse(service.checkpoints.archive(address), media_type="application/x-tar")


async def weights_info(exchange: Exchange) -> Response:
    address = Address.parse(exchange.fields.need("tinker_path"))
    run = exchange.service.sessions.run(exchange.tenant, address.run)
    spec = await asyncio.to_thread(lambda: read_spec(exchange.service.checkpoints.file(address)))
    return as_json({
        "base_model": run.base_model, "is_lora": not spec.is_whole, "lora_rank": spec.rank or None,
        "train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn,
    })  # fmt: skip


def _address(exchange: Exchange) -> Address:
    """The checkpoint that a path names, of a run of the tenant's."""
    run = exchange.service.sessions.run(exchange.tenant, exchange.path("run"))
    return Address.parse(f"tinker://{run.model_id}/{exchange.path('checkpoint')}")


def _run(service: Service, run: ClientFacts) -> dict[str, Any]:
    found = service.checkpoints.of_run(run.model_id)
    return {
        "training_run_id": run.model_id, "base_model": run.base_model, "model_owner": run.tenant,
        "is_lora": not service.backend.facts.is_whole, "lora_rank": run.rank,
        "corrupted": False,
        "last_request_time": iso(max([run.created, *(one.time for one in found)])),
        "last_checkpoint": _last(found, "weights"), "last_sampler_checkpoint": _last(found, "sampler_weights"),
        "user_metadata": _texts(run.metadata),
    }  # fmt: skip


def _last(found: list[Checkpoint], folder: str) -> dict[str, Any] | None:
    return next((one.told() for one in reversed(found) if one.folder == folder), None)


def _signature(address: Address, until: int) -> str:
    return hmac.new(_SECRET, f"{until}/{address.path}".encode(), hashlib.sha256).hexdigest()


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return {key: str(value) for key, value in metadata.items()} if metadata else None


def tokenizer_of(service: Service) -> str | None:
    """Where a client finds the tokenizer: in the model's directory, if it is on this machine; None: by the model's
    name."""
    return service.backend.facts.path if service.config.host in LOOPBACK else None
