"""HTTP of `penstock ui`: the page, its data as JSON, and what changes as a stream of events.

    GET /                 the page; /static/ its files          GET /api/compare    several runs: run=…&run=…
    GET /api/runs         all runs, one line each               GET /api/series     numbers of charts: key=…
    GET /api/run          one run: run=…                        GET /api/live       events: runs that changed
    GET /api/samples      of a run, by what they are            GET /api/sample     one with its tokens

Files are read in threads, one at a time. Who may see it: `door.py`.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from penstock.orchestrator.ui.runs.rollouts import Wanted
from penstock.orchestrator.ui.server.answers import Answers, NoSuchRun
from penstock.orchestrator.ui.server.door import Door
from penstock.orchestrator.ui.server.live import Live

STATIC = Path(__file__).parent.parent / "static"
LOOK_S = 1.0
"""Between two looks at what has changed."""
PING_S = 15
"""Between signs of life of a stream."""
DEFAULT_POINTS = 1000
WANTED: dict[str, Callable[[str], Any]] = {
    "first_step": int, "last_step": int, "group": int, "least_reward": float, "most_reward": float,
    "least_tokens": int, "most_tokens": int, "finish_reason": str, "text": str, "sort": str, "offset": int,
    "limit": int,
}  # fmt: skip
"""Fields of `Wanted`, as an address has them."""


def make_app(place: Path, key: str | None = None, *, look_s: float = LOOK_S) -> Starlette:
    """`place`: a run, or a directory with runs below. `key`: that visitors need; None: whoever reaches the port may
    see it, by a name of this machine's loopback."""
    answers, reading = Answers(place), threading.Lock()
    live = Live(look_s)

    async def read(call: Callable[[], Any]) -> Any:
        def alone() -> Any:
            with reading:
                return call()

        return await run_in_threadpool(alone)

    async def runs(request: Request) -> Response:
        return JSONResponse(await read(answers.table))

    async def run(request: Request) -> Response:
        name = request.query_params.get("run", "")
        return _json(await read(lambda: answers.run(name)))

    async def compare(request: Request) -> Response:
        names = request.query_params.getlist("run")
        return _json(await read(lambda: answers.compared(names)))

    async def series(request: Request) -> Response:
        asked = request.query_params
        name, keys = asked.get("run", ""), asked.getlist("key")
        points = int(asked.get("points", DEFAULT_POINTS))
        first, last = float(asked.get("first", "-inf")), float(asked.get("last", "inf"))
        return JSONResponse(await read(lambda: answers.series(name, keys, points, first, last)))

    async def samples(request: Request) -> Response:
        wanted = wanted_of(request.query_params)
        name = request.query_params.get("run", "")
        return _json(await read(lambda: answers.samples(name, wanted)))

    async def sample(request: Request) -> Response:
        asked = request.query_params
        name, step, place = asked.get("run", ""), int(asked.get("step", "")), int(asked.get("place", ""))
        return _json(await read(lambda: answers.sample(name, step, place)))

    async def stream(request: Request) -> Response:
        return EventSourceResponse(live.events(), ping=PING_S)

    @contextlib.asynccontextmanager
    async def looking(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(live.run(lambda: read(answers.table)))
        try:
            yield
        finally:
            task.cancel()

    return Starlette(
        routes=[
            Route("/", lambda request: FileResponse(STATIC / "index.html")),
            Route("/api/runs", runs),
            Route("/api/run", run),
            Route("/api/compare", compare),
            Route("/api/series", series),
            Route("/api/samples", samples),
            Route("/api/sample", sample),
            Route("/api/live", stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Door, key=key), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={NoSuchRun: _not_there, LookupError: _not_there, ValueError: _bad_value},
        lifespan=looking,
    )


def wanted_of(asked: QueryParams) -> Wanted:
    """What of a run's samples is asked for. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for name, kind in WANTED.items():
        if (value := asked.get(name, "")) != "":
            found[name] = kind(value)
    return Wanted(**found, down=asked.get("down", "1") != "0")


def _json(value: Any) -> Response:
    """Of what others wrote: whatever YAML makes that JSON lacks becomes text."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return Response(text.encode(errors="replace"), media_type="application/json")


async def _not_there(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404)


async def _bad_value(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)
