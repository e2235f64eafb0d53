"""The HTTP of `penstock ui`: the page, its data as JSON, and what changes as a stream of events.

    GET /             the page              GET /api/NAME    an answer of `answers.py`, as JSON
    GET /static/…     its files             GET /api/live    events: runs that changed, from one look a second for all

Files are read in threads. `Door` decides about access.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.orchestrator.observability.ui.server.answers import QUESTIONS, Answers, NoSuchRun
from penstock.orchestrator.run_directory.json_lines import json_of

STATIC = Path(__file__).parent.parent / "static"
LOOK_S = 1.0
"""Seconds between two looks at what has changed."""
PING_S = 15
"""Seconds between pings of a stream."""
END_S = 1.0
"""Seconds for a stream to end by itself with the server, which waits twice as long (`serve.py`)."""
COOKIE = "penstock_key"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
"""Content policy: nothing from elsewhere, and no script in what a model wrote. Styles: the charts set their sizes."""
_LOG = logging.getLogger("penstock")
SHARE = 4
"""Least pause after a look, in multiples of its time: so many runs on a slow disk keep no core busy."""
BEHIND = 8
"""Most changes that wait for a slow page; then it is told to ask for everything anew."""
ANEW = {"anew": True}
Table = list[dict[str, Any]]
Handler = Callable[[Request], Awaitable[Response]]


def make_app(place: Path, key: str | None = None, *, look_s: float = LOOK_S) -> Starlette:
    """Make the application. `place`: a run, or a directory with runs below. `key`: the one that visitors need; None:
    any visitor who reaches the port by a name of this machine's loopback may see the page."""
    answers, live = Answers(place), Live(look_s)
    return Starlette(
        routes=[
            Route("/", _page),
            *(Route(f"/api/{name}", answering(answers, question)) for name, question in QUESTIONS.items()),
            Route("/api/live", streaming(live)),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Door, key=key), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)],
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


class Door:
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


class Live:
    """Lifecycle: `run` until it is cancelled; `events` for each page."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._pages: set[asyncio.Queue[dict[str, Any]]] = set()
        self._new: set[asyncio.Queue[dict[str, Any]]] = set()
        """Queues of `_pages` that have not been told anything: what they have asked for may be older than a look."""
        self._lines: dict[str, dict[str, Any]] = {}

    async def run(self, look: Callable[[], Awaitable[Table]]) -> None:
        while True:
            started = time.monotonic()
            if self._pages:
                try:
                    self._tell({line["id"]: line for line in await look()})
                except OSError as error:
                    _LOG.warning("the runs cannot be looked at: %s", error)
            await asyncio.sleep(max(self._look_s, SHARE * (time.monotonic() - started)))

    async def events(self, ending: anyio.Event | None = None) -> AsyncIterator[dict[str, str]]:
        """Events `{"runs": {id: its line, or null}}` of runs that changed; `ANEW` first, after the first look.
        `ending`: set when the server ends."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pages.add(queue)
        self._new.add(queue)
        ended = asyncio.create_task((ending or anyio.Event()).wait())
        try:
            while not ended.done():
                change = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait({change, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if change.done():
                        yield _event(change.result())
                finally:
                    change.cancel()
        finally:
            ended.cancel()
            self._pages.discard(queue)
            self._new.discard(queue)

    def _tell(self, lines: dict[str, dict[str, Any]]) -> None:
        before, self._lines = self._lines, lines
        names = [name for name in before | lines if before.get(name) != lines.get(name)]
        for queue in self._pages:
            if queue in self._new:
                self._new.discard(queue)
                queue.put_nowait(ANEW)
            elif names and queue.qsize() < BEHIND:
                queue.put_nowait({"runs": {name: lines.get(name) for name in names}})
            elif names and queue.qsize() == BEHIND:
                queue.put_nowait(ANEW)


def streaming(live: Live) -> Handler:
    async def stream(request: Request) -> Response:
        ending = anyio.Event()
        return EventSourceResponse(live.events(ending), ping=PING_S, shutdown_event=ending, shutdown_grace_period=END_S)

    return stream


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


def _event(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json_of(value).encode(errors="replace").decode()}
