"""The HTTP of `penstock ui`: the page, its data as JSON, and what changes as a stream of events.

    GET /             the page              GET /api/NAME    an answer of `questions.py`, as JSON
    GET /static/…     its files             GET /api/live    events: runs that changed

Files are read in threads. `door.py` decides about access.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from penstock.orchestrator.observability.ui.server.answers import Answers, NoSuchRun
from penstock.orchestrator.observability.ui.server.door import Door
from penstock.orchestrator.observability.ui.server.live import Live
from penstock.orchestrator.observability.ui.server.questions import QUESTIONS
from penstock.orchestrator.run_directory.json_lines import json_of

STATIC = Path(__file__).parent.parent / "static"
LOOK_S = 1.0
"""Seconds between two looks at what has changed."""
PING_S = 15
"""Seconds between pings of a stream."""
END_S = 1.0
"""Seconds for a stream to end by itself with the server, which waits twice as long (`serve.py`)."""

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


def streaming(live: Live) -> Handler:
    async def stream(request: Request) -> Response:
        ending = anyio.Event()
        return EventSourceResponse(live.events(ending), ping=PING_S, shutdown_event=ending, shutdown_grace_period=END_S)

    return stream


def as_json(value: Any, status: int = 200) -> Response:
    """The JSON response of a value that others wrote: what YAML and Python have and JSON lacks becomes text or null. No
    character makes it fail."""
    return Response(json_of(value).encode(errors="replace"), status, media_type="application/json")


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
