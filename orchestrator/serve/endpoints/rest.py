"""Training runs and checkpoints: lists, deletions, lifetimes, archives."""

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

from penstock.orchestrator.serve.checkpoints import Address, Checkpoint, NoCheckpoint, iso
from penstock.orchestrator.serve.endpoints.exchange import Exchange, as_json, refused
from penstock.orchestrator.serve.service import Service
from penstock.orchestrator.serve.training_client import ClientFacts, rank_of

ARCHIVE_S = 900
"""Seconds for which the address of an archive is good."""
_SECRET = secrets.token_bytes(32)
"""Signs addresses of archives, which are fetched without a key."""


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
    spec = await asyncio.to_thread(exchange.service.checkpoints.spec, address)
    return as_json({
        "base_model": run.base_model, "is_lora": not spec.is_whole, "lora_rank": rank_of(spec),
        "train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn,
    })  # fmt: skip


def _address(exchange: Exchange) -> Address:
    """The checkpoint that a path names, of a run of the tenant's."""
    run = exchange.service.sessions.run(exchange.tenant, exchange.path("run"))
    return Address.parse(f"tinker://{run.model_id}/{exchange.path('checkpoint')}")


def _run(service: Service, run: ClientFacts) -> dict[str, Any]:
    found = service.checkpoints.of_run(run.model_id)
    client = service.clients.get(run.model_id)
    metadata = {key: str(value) for key, value in run.metadata.items()} if run.metadata else None
    return {
        "training_run_id": run.model_id, "base_model": run.base_model, "model_owner": run.tenant,
        "is_lora": not service.backend.facts.is_whole, "lora_rank": rank_of(client.spec if client else None),
        "corrupted": False,
        "last_request_time": iso(max([run.created, *(one.time for one in found)])),
        "last_checkpoint": _last(found, "weights"), "last_sampler_checkpoint": _last(found, "sampler_weights"),
        "user_metadata": metadata,
    }  # fmt: skip


def _last(found: list[Checkpoint], folder: str) -> dict[str, Any] | None:
    return next((one.told() for one in reversed(found) if one.folder == folder), None)


def _signature(address: Address, until: int) -> str:
    return hmac.new(_SECRET, f"{until}/{address.path}".encode(), hashlib.sha256).hexdigest()
