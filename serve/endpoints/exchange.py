"""One request over HTTP, and how it is answered: who has sent it is found first, then its body is read, then parsed.

    401 no key, or an unknown one     403 not for this key     404 not there, or another tenant's
    410 a session or result is over   413 too large            422 what was sent cannot be taken
    429 too much of this key waits: the SDK sends the request again after Retry-After
    503 the disk is full, or the server ends: the SDK sends the request again for 5 minutes

The SDK raises 401, 403, 404, 413 and 422 at once. A request with a number is taken all the same where it can be, and
fails in its turn: its number would be missing in the order otherwise.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.metering import table
from penstock.network.proxies import LOOPBACK, names_loopback
from penstock.serve.checkpoints import NoCheckpoint
from penstock.serve.journal import JournalDamaged, JournalError
from penstock.serve.request_log import OtherContent, ResultGone
from penstock.serve.service import Refused, Service
from penstock.serve.sessions import Busy, NotFound, SessionOver
from penstock.serve.tenants import OPERATOR
from penstock.serve.training_client import TooLate
from penstock.serve.wire.bodies import PLAIN_BYTES, Body, Numbered, TooLarge, check_size, read
from penstock.serve.wire.messages import unpacked
from penstock.workers.gateway.http.errors import BadRequest

_LOG = logging.getLogger("penstock")
BODY_S = 300.0
_STATUS: dict[type[PenstockError], int] = {
    Refused: 403, NotFound: 404, NoCheckpoint: 404, SessionOver: 410, ResultGone: 410, JournalError: 503,
    Busy: 429, BadRequest: 422, OtherContent: 422, TooLate: 422, DataError: 422, ConfigError: 422, TooLarge: 413,
    JournalDamaged: 422,
}  # fmt: skip


@dataclass
class Exchange:
    """A request, its sender, and the service."""

    service: Service
    tenant: str
    """Its sender, or `OPERATOR`."""
    request: Request
    body: bytes = b""

    @property
    def fields(self) -> Body:
        """The fields of a body in JSON. Raises `BadRequest`."""
        return read(Body, self.body)

    @property
    def numbered(self) -> Numbered:
        return read(Numbered, self.body)

    def header(self, name: str) -> str:
        return self.request.headers.get(name, "")

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def page(self, values: list[Any], limit: int) -> tuple[list[Any], dict[str, int]]:
        """The part of a list that the query asks for, and its cursor."""
        first, num = (self._number("offset", 0), min(1000, self._number("limit", limit)))
        return values[first : first + num], {"offset": first, "limit": num, "total_count": len(values)}

    def _number(self, name: str, default: int) -> int:
        given = self.request.query_params.get(name, "")
        if given and not (given.isdecimal() and len(given) < 10):
            raise BadRequest(f"must be a whole number, not {given[:40]!r}.", name)
        return int(given or default)


Endpoint = Callable[[Exchange], Awaitable[Response]]
Handler = Callable[[Request], Awaitable[Response]]


def as_json(value: Mapping[str, Any] | list[Any], status: int = 200) -> Response:
    return JSONResponse(value, status)


def refused(text: str, status: int) -> Response:
    """A response that the SDK raises with this text, or retries after 429. Who may not be here keeps no connection."""
    body = {"error": text, "detail": text, "category": "user" if status < 500 else "server"}
    headers = {401: {"connection": "close"}, 403: {"connection": "close"}, 429: {"retry-after": "1"}}
    return JSONResponse(body, status, headers.get(status))


def answering(service: Service, endpoint: Endpoint, *, has_data: bool = False, for_operator: bool = False) -> Handler:
    """The handler of an endpoint. `has_data`: its requests may be as large as `serve.max_body_mib`. `for_operator`: the
    operator may use it, too."""
    limit_bytes = service.config.max_body_mib * 2**20 if has_data else PLAIN_BYTES

    async def answer(request: Request) -> Response:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if _is_foreign(request, service.config.host):
            return refused("this server is for programs that know its address, not for pages of other sites.", 403)
        tenant = service.tenants.who(key)
        if tenant is None:
            return refused("a key is needed: set TINKER_API_KEY to the one that the server's operator gave you.", 401)
        if tenant == OPERATOR and not for_operator:
            return refused("this key is the operator's: clients have keys of their own (serve.tenants).", 403)
        exchange = Exchange(service, tenant, request)
        try:
            if request.method in ("POST", "PUT"):
                async with asyncio.timeout(BODY_S) as patience, service.tenants.bodies[tenant][has_data]:
                    packed = await _read(request, limit_bytes)
                    patience.reschedule(None)
                    encoding = request.headers.get("content-encoding", "")
                    exchange.body = await asyncio.to_thread(unpacked, packed, encoding, limit_bytes)
                    if has_data:
                        return await endpoint(exchange)
            return await endpoint(exchange)
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return refused(f"the body did not come within {BODY_S:g} s.", 408)
        except PenstockError as error:
            status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
            if status == 429:
                service.tenants.meters.add(table.SERVE_REFUSED, tenant=tenant)
            return refused(str(error), status)
        except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
            _LOG.exception("%s %s", request.method, request.url.path)
            return refused(f"{type(error).__name__}: {error}", 500)

    return answer


def _is_foreign(request: Request, interface: str) -> bool:
    """Return whether a page of another site has a browser send this: it names another origin, or, by DNS rebinding,
    another host than loopback."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    is_rebound = interface in LOOPBACK and not names_loopback(host)
    return is_rebound or (origin is not None and origin.partition("://")[2] != host)


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, as it was sent. Raises `TooLarge` as soon as it is."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        check_size(num_bytes, limit_bytes)
        parts.append(part)
    return b"".join(parts)
