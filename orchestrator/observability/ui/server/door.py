"""Access to the page. Without a key: for visitors who reach the port by a name of this machine's loopback, so that no
page of another site can have a browser read it (DNS rebinding). With a key: for visitors who have it, in the address
once, then in a cookie.
"""

import hmac
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "penstock_key"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
"""Content policy: nothing from elsewhere, and no script in what a model wrote. Styles: the charts set their sizes."""


class Door:
    """ASGI middleware that checks the access."""

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers.setdefault(
                    "Cache-Control", "no-cache"
                )  # a browser asks whether the page is still that of yesterday
            await send(message)

        await self._app(scope, receive, told)

    def _refusal(self, request: Request) -> Response | None:
        """The response that refuses a request; None: it is allowed."""
        if self._key is None:
            if host_of(request.headers) in LOOPBACK:
                return None
            return PlainTextResponse("This page is for this machine alone: open it as http://localhost.", 403)
        if _is(request.query_params.get("key"), self._key):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "key"]
            there = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), 303)
            there.set_cookie(COOKIE, self._key, httponly=True, samesite="strict")
            return there
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _is(request.cookies.get(COOKIE), self._key) or _is(bearer, self._key):
            return None
        return PlainTextResponse("A key is needed: open the address that `penstock ui` has printed.", 401)


def host_of(headers: Headers) -> str:
    """The host of a request, without the port."""
    host = headers.get("host", "")
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


def _is(given: str | None, key: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), key.encode())
