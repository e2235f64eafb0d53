"""One request over HTTP, and how it is answered: who has sent it is found first, then its body is read, then parsed.

    401 no key, or an unknown one     403 not for this key     404 not there, or another tenant's
    410 a session or result is over   413 too large            422 what was sent cannot be taken
    503 the disk is full, or the server ends: the SDK sends the request again for 5 minutes

The SDK raises 401, 403, 404, 413 and 422 at once. A request with a number is taken all the same where it can be, and
fails in its turn: its number would be missing in the order otherwise.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.orchestrator.serve.checkpoints import NoCheckpoint
from penstock.orchestrator.serve.journal import JournalError
from penstock.orchestrator.serve.request_log import OtherContent, ResultGone
from penstock.orchestrator.serve.service import Refused, Service
from penstock.orchestrator.serve.sessions import NotFound, SessionOver
from penstock.orchestrator.serve.tenants import Visitor
from penstock.orchestrator.serve.training_client import TooLate
from penstock.orchestrator.serve.wire.messages import unpacked
from penstock.workers.gateway.http.errors import BadRequest
from penstock.workers.gateway.http.fields import Fields, parsed

_LOG = logging.getLogger("penstock")
_STATUS: dict[type[PenstockError], int] = {
    Refused: 403, NotFound: 404, NoCheckpoint: 404, SessionOver: 410, ResultGone: 410, JournalError: 503,
    BadRequest: 422, OtherContent: 422, TooLate: 422, DataError: 422, ConfigError: 422,
}  # fmt: skip


class TooLarge(PenstockError):
    """A body beyond `serve.max_body_mib`."""


@dataclass
class Exchange:
    """A request, its sender, and the service."""

    service: Service
    visitor: Visitor
    request: Request
    body: bytes = b""

    @property
    def tenant(self) -> str:
        return self.visitor.tenant

    @property
    def fields(self) -> Fields:
        return parsed(self.body)

    def header(self, name: str) -> str:
        return self.request.headers.get(name, "")

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def number(self, name: str, default: int, most: int) -> int:
        """A whole number of the query."""
        given = self.request.query_params.get(name, "")
        if given and not given.isdecimal():
            raise BadRequest(f"must be a whole number, not {given[:40]!r}.", name)
        return min(most, int(given)) if given else default


Endpoint = Callable[[Exchange], Awaitable[Response]]
Handler = Callable[[Request], Awaitable[Response]]


def as_json(value: Mapping[str, Any] | list[Any], status: int = 200) -> Response:
    return JSONResponse(value, status)


def refused(text: str, status: int) -> Response:
    """A response that the SDK raises with this text."""
    return as_json({"error": text, "detail": text, "category": "user" if status < 500 else "server"}, status)


def answering(service: Service, endpoint: Endpoint, *, for_operator: bool = False) -> Handler:
    """The handler of an endpoint. `for_operator`: the operator may use it, too."""

    async def answer(request: Request) -> Response:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        visitor = service.tenants.visitor(key)
        if visitor is None:
            return refused("a key is needed: set TINKER_API_KEY to the one that the server's operator gave you.", 401)
        if visitor.is_operator and not for_operator:
            return refused("this key is the operator's: clients have keys of their own (serve.tenants).", 403)
        exchange = Exchange(service, visitor, request)
        try:
            if request.method in ("POST", "PUT"):
                limit_bytes = service.config.max_body_mib * 2**20
                packed = await _read(request, limit_bytes)
                exchange.body = unpacked(packed, request.headers.get("content-encoding", ""), limit_bytes)
            return await endpoint(exchange)
        except TooLarge as error:
            return refused(str(error), 413)
        except ClientDisconnect:
            return Response(status_code=400)
        except PenstockError as error:
            status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
            return refused(str(error), status)
        except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
            _LOG.exception("%s %s", request.method, request.url.path)
            return refused(f"{type(error).__name__}: {error}", 500)

    return answer


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, as it was sent. Raises `TooLarge` as soon as it is."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise TooLarge(f"the body is larger than {limit_bytes:,} bytes (serve.max_body_mib). Send less at once.")
        parts.append(part)
    return b"".join(parts)
