"""The table of paths. What is not done has its line here, too: it is refused by name."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.serve.endpoints import futures, sessions
from penstock.serve.endpoints.exchange import Endpoint, Exchange, answering, as_json, refused
from penstock.serve.service import Service
from penstock.serve.status import metrics, status

API = "/api/v1"
METHODS = ["GET", "POST", "PUT", "DELETE"]
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
    ("POST", "create_model"): futures.create_model,
    ("POST", "get_info"): futures.get_info,
    ("POST", "unload_model"): futures.unload,
    **{("POST", kind): futures.request(kind) for kind in NUMBERED},
    ("POST", "create_sampling_session"): futures.create_sampling_session,
    ("POST", "join_sampling_session"): futures.join_sampling_session,
    ("GET", "samplers/{sampler}"): futures.get_sampler,
    ("POST", "asample"): futures.sample,
    ("POST", "retrieve_future"): futures.retrieve,
    ("POST", "cancel_future"): futures.cancel,
    ("GET", "training_runs"): sessions.list_runs,
    ("GET", "training_runs/{run}"): sessions.get_run,
    ("GET", "training_runs/{run}/checkpoints"): sessions.list_checkpoints,
    ("GET", "checkpoints"): sessions.list_checkpoints,
    ("GET", "training_runs/{run}/checkpoints/{checkpoint:path}/archive"): sessions.archive,
    ("PUT", "training_runs/{run}/checkpoints/{checkpoint:path}/ttl"): sessions.set_ttl,
    ("DELETE", "training_runs/{run}/checkpoints/{checkpoint:path}"): sessions.delete_checkpoint,
    ("POST", "weights_info"): sessions.weights_info,
}
_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
REFUSED = {
    "auth/token": "keys are used as they are here: no token is given for one.",
    "auth/apikey/me": "keys are in the server's configuration (serve.tenants): set TINKER_API_KEY.",
    "create_custom_loss": "custom losses run in the client here: use forward_backward_custom.",
    "copy_weights": "weights are not copied between projects here: there are none.",
    "sessions/{session}/project": "there are no projects here.",
    "sessions/{session}/trace_export": "traces are not exported here.",
    "sessions/search": "sessions are not searched here: list them.",
    "audit": "there is no audit log here.",
    "billing/{path:path}": "nothing is billed here: /metrics has what was used.",
    f"{_CHECKPOINT}/publish": "checkpoints are their tenant's alone here, and not published: send an archive.",
    f"{_CHECKPOINT}/external_weights_urls": "weights are not exported here: use the archive of sampler weights.",
}


def routes(service: Service) -> list[Route]:
    """All routes; the more special ones first."""

    async def archive(request: Request) -> Response:
        return await sessions.download(service, request)

    refusing = [_route(service, METHODS, path, _refusal(text)) for path, text in REFUSED.items()]
    done = [_route(service, [method], path, endpoint) for (method, path), endpoint in ENDPOINTS.items()]
    own = [
        Route("/metrics", answering(service, _metrics, for_operator=True)),
        Route("/status", answering(service, _status, for_operator=True)),
        Route("/archives/{until}/{signature}/{run}/{folder}/{name}", archive),
    ]
    return [*refusing, *done, *own, Route("/{path:path}", answering(service, _unknown), methods=METHODS)]


def _route(service: Service, methods: list[str], path: str, endpoint: Endpoint) -> Route:
    return Route(f"{API}/{path}", answering(service, endpoint, has_data=path in WITH_DATA), methods=methods)


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
