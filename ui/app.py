"""`penstock ui`: serves the page, its data as JSON, and what changes as a stream of events, until it is interrupted.

    GET /             the page              GET /api/NAME    an answer of `answers.py`, as JSON
    GET /static/…     its files             GET /api/live    events: runs that changed, from one look a second for all
    GET /picture      one that samples name, by its run and name

Files are read in threads. `AccessCheck` decides about access.
"""

import asyncio
import contextlib
import hmac
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
import uvicorn
from rich.console import Console
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.conf.errors import ConfigError
from penstock.network.host import LOOPBACK, names_loopback, raise_limit
from penstock.network.listener import BACKLOG, CONNECTIONS, Heads, listen
from penstock.orchestrator.observability import charts
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.ui.answers import QUESTIONS, Answers, Live, NoSuchRun
from penstock.ui.remote import Copy
from penstock.workers.runtime.url_files import is_url

STATIC = Path(charts.__file__).parent / "static"
LOOK_S = 1.0
"""Seconds between two looks at what has changed."""
PING_S = 15
"""Seconds between pings of a stream."""
END_S = 1.0
"""Seconds for a stream to end by itself with the server, which waits twice as long."""
COOKIE = "penstock_key"
PORTS = range(8420, 8440)
"""Ports of which the first free one is taken, unless one is asked for."""
GRACE_S = 2
"""Seconds for open pages when the server ends."""
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
"""Content policy: nothing from elsewhere, and no script in what a model wrote. Styles: the charts set their sizes."""
PICTURE_HEADERS = {"Cache-Control": "private, max-age=31536000, immutable", "Content-Encoding": "identity"}
"""Headers of pictures, which are named by their content. The encoding keeps them from being packed once more."""
Handler = Callable[[Request], Awaitable[Response]]


def serve(
    place: str, console: Console, host: str = "127.0.0.1", port: int | None = None, key: str | None = None
) -> None:
    """Serve the page. `port`: None for the first that is free; 0 for any. `key`: the one that visitors need; where
    others than this machine can reach the page, there is one in any case. Raises `ConfigError`, `CheckpointError` for a
    URL that does not answer."""
    if is_url(place):
        with tempfile.TemporaryDirectory(prefix="penstock-ui-") as folder:
            copy = Copy(place, Path(folder))
            with copy.follow():
                _serve(Path(folder), place, console, host, port, key, copy.bring)
        return
    directory = Path(place).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"{place}: there is no such directory. Name one with runs in it, or a run: `penstock ui runs`."
        )
    _serve(directory, place, console, host, port, key)


def _serve(
    directory: Path,
    place: str,
    console: Console,
    host: str,
    port: int | None,
    key: str | None,
    bring: Callable[[str], None] | None = None,
) -> None:
    """Serve a directory. `place`: its name for people."""
    shown = f"[{host}]" if ":" in host else host
    told = "?key=…" if key else ""
    if key is None and host not in LOOPBACK:
        key = secrets.token_urlsafe(16)
        told = f"?key={key}"
    bound = listen(host, PORTS if port is None else [port])
    address = f"http://{shown}:{bound.getsockname()[1]}/{told}"
    console.print(f"[bold]{place}[/] at {address}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C ends it.", style="dim")
    config = uvicorn.Config(
        make_app(directory, key, bring), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S,
        http=Heads().before(H11Protocol), limit_concurrency=min(CONNECTIONS, raise_limit() // 2), backlog=BACKLOG,
    )  # fmt: skip
    with bound:
        uvicorn.Server(config).run([bound])


def make_app(
    place: Path, key: str | None = None, bring: Callable[[str], None] | None = None, *, look_s: float = LOOK_S
) -> Starlette:
    """Make the application. `place`: a run, or a directory with runs below. `key`: the one that visitors need; None:
    any visitor who reaches the port by a name of this machine's loopback may see the page. `bring`: as `OpenRun` takes
    it."""
    answers, live = Answers(place, bring), Live(look_s)
    return Starlette(
        routes=[
            Route("/", _page),
            *(Route(f"/api/{name}", answering(answers, question)) for name, question in QUESTIONS.items()),
            Route("/api/live", streaming(live)),
            Route("/picture", picturing(answers)),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(AccessCheck, key=key), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)],
        exception_handlers={
            NoSuchRun: _refused(404), LookupError: _refused(404), ValueError: _refused(400), OSError: _refused(503),
            Exception: _refused(500),
        },
        lifespan=lambda app: _looking(live, answers),
    )  # fmt: skip


def answering(answers: Answers, question: Callable[[Answers, QueryParams], Any]) -> Handler:
    """The handler of a question, which is answered and written as JSON in a thread."""

    async def answer(request: Request) -> Response:
        return await run_in_threadpool(lambda: as_json(question(answers, request.query_params)))

    return answer


def as_json(value: Any, status: int = 200) -> Response:
    """The JSON response of a value that others wrote: what YAML and Python have and JSON lacks becomes text or null. No
    character makes it fail."""
    return Response(json_of(value).encode(errors="replace"), status, media_type="application/json")


class AccessCheck:
    """ASGI middleware that checks the access. Without a key: for visitors who reach the port by a name of this
    machine's loopback, so that no page of another site can have a browser read it (DNS rebinding). With a key: for
    visitors who have it, in the address once, then in a cookie."""

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
            if names_loopback(request.headers.get("host", "")):
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


def streaming(live: Live) -> Handler:
    async def stream(request: Request) -> Response:
        ending = anyio.Event()
        return EventSourceResponse(live.events(ending), ping=PING_S, shutdown_event=ending, shutdown_grace_period=END_S)

    return stream


def picturing(answers: Answers) -> Handler:
    async def picture(request: Request) -> Response:
        run, name = (request.query_params.get(word, "") for word in ("run", "name"))
        data = await run_in_threadpool(lambda: answers.opened(run).picture(name))
        kind = "image/png" if name.endswith("png") else "image/jpeg"
        return Response(data, headers=PICTURE_HEADERS, media_type=kind)

    return picture


@contextlib.asynccontextmanager
async def _looking(live: Live, answers: Answers) -> AsyncIterator[None]:
    task = asyncio.create_task(live.run(lambda: run_in_threadpool(answers.table)))
    try:
        yield
    finally:
        task.cancel()


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _refused(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refusal(request: Request, error: Exception) -> Response:
        return as_json({"error": str(error)}, status)

    return refusal


def _is(given: str | None, key: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), key.encode())
