"""What the server is doing, as plain data: tenants, their training clients, queues, and what each waits for."""

import time
from typing import Any

from penstock.metering import table
from penstock.serve.service import Service
from penstock.serve.tenants import OPERATOR
from penstock.serve.training_client import TrainingClient


def status(service: Service, who: str) -> dict[str, Any]:
    """The state of the server; a tenant sees its own."""
    names = [name for name in service.tenants.configs if who in (OPERATOR, name)]
    facts = service.backend.facts
    return {
        "model": {"name": facts.name, "max_length": facts.max_length, "max_rank": facts.max_rank},
        "is_ending": service.is_ending.is_set(),
        "losses_of_ranks": service.ranks.num_losses,
        "tenants": {name: _tenant(service, name) for name in names},
    }


def metrics(service: Service, who: str) -> str:
    """What each tenant has used and has under way, as Prometheus reads it; a tenant sees its own."""
    status(service, who)  # measures what there is now
    found: dict[str, list[str]] = {}
    for series, value in service.tenants.meters.read().items():
        if who in (OPERATOR, dict(series.labels)["tenant"]):
            shown = ",".join(f'{label}="{text}"' for label, text in series.labels)
            head = f"# TYPE {series.metric.name} {series.metric.kind}"
            found.setdefault(head, []).append(f"{series.name}{{{shown}}} {value}")
    return "".join(f"{line}\n" for head, lines in found.items() for line in (head, *lines))


def _tenant(service: Service, name: str) -> dict[str, Any]:
    config, runs = service.tenants.configs[name], service.sessions.runs(name)
    clients = [_client(service, client) for client in service.clients.values() if client.facts.tenant == name]
    num_waiting, waiting_bytes = service.waiting(name)
    stored = service.checkpoints.num_bytes(run.model_id for run in runs)
    for metric, value in {
        table.SERVE_WAITING: num_waiting, table.SERVE_WAITING_BYTES: waiting_bytes, table.SERVE_ADAPTERS: len(clients),
        table.SERVE_RESIDENT: sum(client["on_ranks"] for client in clients), table.SERVE_STORED: stored,
    }.items():  # fmt: skip
        service.tenants.meters.put(metric, value, tenant=name)
    sessions = [one for one in service.sessions.sessions.values() if one.tenant == name and not one.is_over]
    return {
        "share": config.share,
        "tokens_per_minute": config.tokens_per_minute,
        "paused_s": service.samples.schedule.opens_in(name, time.monotonic()),
        "max_adapters": config.max_adapters,
        "max_stored_gib": config.max_stored_gib,
        "usage": service.tenants.usage(name),
        "sessions": [
            {"id": one.id, "name": one.display_name, "silent_s": time.time() - one.last_seen, "rests": one.is_resting}
            for one in sessions
        ],
        "clients": clients,
    }


def _client(service: Service, client: TrainingClient) -> dict[str, Any]:
    is_waiting = client.num_waiting > 0
    return {
        "id": client.facts.model_id,
        "session": client.facts.session_id,
        "base_model": client.facts.base_model,
        "rank": client.facts.rank,
        "next": client.next_seq,
        "waiting": client.num_waiting,
        "on_ranks": client.is_resident,
        "snapshot": client.snapshot_seq,
        "waits_for": service.waits_for(client, client.next) if is_waiting else "the client's next request",
    }
