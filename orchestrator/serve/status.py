"""What the server is doing, as plain data: tenants, their training clients, queues, and what each waits for."""

import time
from dataclasses import asdict
from typing import Any

from penstock.orchestrator.serve.service import Service
from penstock.orchestrator.serve.tenants import OPERATOR
from penstock.orchestrator.serve.training_client import TrainingClient, rank_of


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
    found: dict[str, list[str]] = {}

    def note(metric: str, kind: str, labels: str, value: float) -> None:
        name = f"penstock_serve_{metric}"
        found.setdefault(f"# TYPE {name} {kind}", []).append(f"{name}{{{labels}}} {value:g}")

    for name, told in status(service, who)["tenants"].items():
        tenant, clients = f'tenant="{name}"', told["clients"]
        for kind, count in sorted(told["usage"].pop("requests").items()):
            note("requests_total", "counter", f'{tenant},kind="{kind}"', count)
        for metric, value in told["usage"].items():
            note(f"{metric}_total", "counter", tenant, value)
        note("adapters", "gauge", tenant, len(clients))
        note("adapters_on_ranks", "gauge", tenant, sum(client["on_ranks"] for client in clients))
        note("requests_waiting", "gauge", tenant, sum(client["waiting"] for client in clients))
        note("samples_waiting", "gauge", tenant, told["samples_waiting"])
    return "".join(f"{line}\n" for head, lines in found.items() for line in (head, *lines))


def _tenant(service: Service, name: str) -> dict[str, Any]:
    config, usage = service.tenants.configs[name], service.tenants.usage[name]
    sessions = [one for one in service.sessions.sessions.values() if one.tenant == name and not one.is_over]
    return {
        "share": config.share,
        "tokens_per_minute": config.tokens_per_minute,
        "paused_s": service.samples.schedule.opens_in(name, time.monotonic()),
        "max_adapters": config.max_adapters,
        "usage": {**asdict(usage), "requests": dict(usage.requests)},
        "samples_waiting": service.samples.queue.num_waiting(name),
        "sessions": [
            {"id": one.id, "name": one.display_name, "silent_s": time.time() - one.last_seen, "rests": one.is_resting}
            for one in sessions
        ],
        "clients": [_client(service, client) for client in service.clients.values() if client.facts.tenant == name],
    }


def _client(service: Service, client: TrainingClient) -> dict[str, Any]:
    is_waiting = client.num_waiting > 0
    return {
        "id": client.facts.model_id,
        "session": client.facts.session_id,
        "base_model": client.facts.base_model,
        "rank": rank_of(client.spec),
        "next": client.next_seq,
        "waiting": client.num_waiting,
        "on_ranks": client.is_resident,
        "snapshot": client.snapshot_seq,
        "waits_for": service.waits_for(client, client.next) if is_waiting else "the client's next request",
    }
