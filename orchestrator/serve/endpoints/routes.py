"""The table of paths. What is not done has its line here, too: it is refused by name."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.orchestrator.serve.endpoints import futures, rest, sampling, sessions, training
from penstock.orchestrator.serve.endpoints.exchange import Endpoint, Exchange, answering, as_json, refused
from penstock.orchestrator.serve.service import Service
from penstock.orchestrator.serve.status import metrics, status

API = "/api/v1"
NUMBERED = (
    "forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights",
    "save_weights_external",
)  # fmt: skip
WITH_DATA = ("forward", "forward_backward", "asample")
"""Endpoints whose requests may be large."""
ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("GET", "healthz"): sessions.health,
    ("POST", "client/config"): sessions.client_config,
    ("POST", "client/dynamic_config"): sessions.dynamic_config,
    ("POST", "telemetry"): sessions.telemetry,
    ("GET", "get_server_capabilities"): sessions.capabilities,
    ("POST", "create_session"): sessions.create_session,
    ("POST", "session_heartbeat"): sessions.heartbeat,
    ("POST", "sessions/{session}/finish"): sessions.finish_session,
    ("GET", "sessions"): sessions.list_sessions,
    ("GET", "sessions/{session}"): sessions.get_session,
    ("POST", "create_model"): training.create_model,
    ("POST", "get_info"): training.get_info,
    ("POST", "unload_model"): training.unload,
    **{("POST", kind): training.request(kind) for kind in NUMBERED},
    ("POST", "create_sampling_session"): sampling.create_sampling_session,
    ("POST", "join_sampling_session"): sampling.join_sampling_session,
    ("GET", "samplers/{sampler}"): sampling.get_sampler,
    ("POST", "asample"): sampling.sample,
    ("POST", "retrieve_future"): futures.retrieve,
    ("POST", "cancel_future"): futures.cancel,
    ("GET", "training_runs"): rest.list_runs,
    ("GET", "training_runs/{run}"): rest.get_run,
    ("GET", "training_runs/{run}/checkpoints"): rest.list_checkpoints,
    ("GET", "checkpoints"): rest.list_checkpoints,
    ("GET", "training_runs/{run}/checkpoints/{checkpoint:path}/archive"): rest.archive,
    ("PUT", "training_runs/{run}/checkpoints/{checkpoint:path}/ttl"): rest.set_ttl,
    ("DELETE", "training_runs/{run}/checkpoints/{checkpoint:path}"): rest.delete_checkpoint,
    ("POST", "weights_info"): rest.weights_info,
}
REFUSED: dict[tuple[str, str], str] = {
    ("POST", "auth/token"): "keys are used as they are here: no token is given for one.",
    ("GET", "auth/apikey/me"): "keys are in the server's configuration (serve.tenants): set TINKER_API_KEY.",
    ("DELETE", "auth/apikey/me"): "keys are in the server's configuration (serve.tenants): take it out there.",
    ("POST", "create_custom_loss"): "custom losses run in the client here: use forward_backward_custom.",
    ("POST", "copy_weights"): "weights are not copied between projects here: there are none.",
    ("PUT", "sessions/{session}/project"): "there are no projects here.",
    ("GET", "sessions/{session}/trace_export"): "traces are not exported here.",
    ("POST", "sessions/search"): "sessions are not searched here: list them.",
    ("GET", "audit"): "there is no audit log here.",
    ("GET", "billing/usage/events"): "nothing is billed here: /metrics has what was used.",
    ("GET", "billing/usage/checkpoints/current"): "nothing is billed here.",
    ("POST", "billing/usage/events"): "nothing is billed here: /metrics has what was used.",
    ("POST", "billing/usage/checkpoints/current"): "nothing is billed here.",
    ("POST", "training_runs/{run}/checkpoints/{checkpoint:path}/publish"): (
        "checkpoints are their tenant's alone here, and not published: send an archive."
    ),
    ("DELETE", "training_runs/{run}/checkpoints/{checkpoint:path}/publish"): "checkpoints are not published here.",
    ("GET", "training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls"): (
        "weights are not exported to other stores here: use the archive of sampler weights."
    ),
}


def routes(service: Service) -> list[Route]:
    """All routes; the more special ones first."""

    async def archive(request: Request) -> Response:
        return await rest.download(service, request)

    refusing = [_route(service, method, path, _refusal(text)) for (method, path), text in REFUSED.items()]
    done = [_route(service, method, path, endpoint) for (method, path), endpoint in ENDPOINTS.items()]
    own = [
        Route("/metrics", answering(service, _metrics, for_operator=True)),
        Route("/status", answering(service, _status, for_operator=True)),
        Route("/archives/{until}/{signature}/{run}/{folder}/{name}", archive),
    ]
    unknown = answering(service, _unknown)
    all_others = Route("/{path:path}", unknown, methods=["GET", "POST", "PUT", "DELETE"])
    return [*refusing, *done, *own, all_others]


def _route(service: Service, method: str, path: str, endpoint: Endpoint) -> Route:
    return Route(f"{API}/{path}", answering(service, endpoint, has_data=path in WITH_DATA), methods=[method])


def _refusal(text: str) -> Endpoint:
    async def refuse(exchange: Exchange) -> Response:
        return refused(f"{exchange.request.url.path}: {text}", 422)

    return refuse


async def _unknown(exchange: Exchange) -> Response:
    return refused(f"{exchange.request.method} {exchange.request.url.path} is not done here.", 404)


async def _metrics(exchange: Exchange) -> Response:
    return PlainTextResponse(metrics(exchange.service, exchange.tenant))


async def _status(exchange: Exchange) -> Response:
    return as_json(status(exchange.service, exchange.tenant))
