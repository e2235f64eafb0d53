"""The server by which agents reach the policy, on the event loop of an environment actor.

    POST /v1/chat/completions, /v1/responses    OpenAI's clients, whose base URL ends in /v1
    POST /v1/messages, …/count_tokens           Anthropic's, which put /v1 behind any base URL: one that ends in /v1
    GET  /v1/models                             works, too, so that an agent is given one address for both

A key belongs to one attempt. Failures of clients and connections are handled as follows:

- A client retries (`x-stainless-retry-count`): it gets the turn that was sampled for the same conversation, if one
  was; nothing is sampled twice. If the first request is still under way when its connection goes, that turn is given
  up, and the second request is sampled.
- Concurrent requests are turns of their own, whether they continue one history or several.
- A client that hangs up before its answer is written, sampled or not, never had it: the turn is in no history, and is
  not trained.
- A request after the attempt has ended: 401, as its key is no longer valid.
- Other errors: see `errors.py`.

A streamed answer is sent when its turn is complete, in a few events. Until then nothing is, so that errors have their
status; after some seconds the stream begins with keep-alive data, and an error is an event in it.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import AttemptOver
from penstock.network.host import bypass_proxy, raise_limit
from penstock.network.listener import BACKLOG, Heads
from penstock.workers.agents.gateway.client_errors import NO_KEY, UNKNOWN_KEY, ClientFailure, error_shape, failure_of
from penstock.workers.agents.gateway.client_protocols import CHAT, MESSAGES, RESPONSES
from penstock.workers.agents.gateway.client_requests import ClientProtocol, ClientRequest, ServerSentEvent, parsed
from penstock.workers.agents.gateway.conversation import Message, kept
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.agents.trajectory import Turn

_LOG = logging.getLogger("penstock")
MAX_BODY_BYTES = 32 * 2**20
LARGE_BYTES = 2**16
"""Size from which a body is read in a thread."""
TOO_LARGE = (
    "The body is larger than this server takes. Send pictures with no more pixels than the model reads (its "
    "preprocessor_config.json), as JPEG, or leave out earlier ones."
)
WAITING_S = 10.0
"""Seconds between keep-alive data in a stream whose turn is being sampled."""
SHUTDOWN_S = 1.0
"""Seconds for answers that are being written when the server stops."""
PROTOCOLS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
"""Protocols by their paths."""
COUNT, MODELS = "/v1/messages/count_tokens", "/v1/models"
VERSION = "/v1"
"""Beginning of all paths. Some clients add it to a base URL that has it already."""
RETRIES = "x-stainless-retry-count"
MAX_TOLD = 100
"""Number of options that are reported by name: clients may send any."""
EVERY_INTERFACE = ("0.0.0.0", "::")


class AttemptKeys:
    """The API keys of attempts: which requests are admitted, and which attempt each belongs to.

    Lifecycle: `admit` an attempt, `sampler_of` its requests, `dismiss` it; `base_url` is known once a server
    listens.
    """

    def __init__(self) -> None:
        self.base_url = ""
        """The server's URL, such as http://127.0.0.1:8000/v1; empty while no server listens."""
        self._samplers: dict[str, TurnSampler] = {}

    def admit(self, sampler: TurnSampler) -> tuple[str, str]:
        """Admit an attempt; return the address, and a key for this attempt alone."""
        key = f"ps-{secrets.token_urlsafe(24)}"
        self._samplers[key] = sampler
        return self.base_url, key

    def sampler_of(self, key: str) -> TurnSampler | None:
        """The sampler of a key; None: no attempt has this key, or not any more."""
        return self._samplers.get(key)

    def dismiss(self, key: str) -> None:
        self._samplers.pop(key, None)


@dataclass
class _AttemptAnswers:
    """The requests of one attempt."""

    tag: str
    """Part of the ids of its answers."""
    delivered: set[int] = field(default_factory=set)
    """Ids of turns that were written to a client."""
    responses: dict[str, Sequence[Message]] = field(default_factory=dict)
    """Conversations that later requests may refer to."""


class HttpServer:
    """Lifecycle: `start`, `stop`."""

    def __init__(
        self, keys: AttemptKeys, *, waiting_s: float = WAITING_S, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._keys, self._waiting_s = keys, waiting_s
        self._answers: WeakKeyDictionary[TurnSampler, _AttemptAnswers] = WeakKeyDictionary()
        self._app = web.Application(client_max_size=max_body_bytes, middlewares=[_answer_failures])
        for before in ("", VERSION):
            for path in PROTOCOLS:
                self._app.router.add_post(before + path, self._answer)
            self._app.router.add_post(before + COUNT, self._count)
            self._app.router.add_get(before + MODELS, self._models)
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._heads = Heads()
        self._told: set[str] = set()

    async def start(self, host: str, port: int, address: str = "") -> str:
        """Start listening; return the address for clients, such as http://127.0.0.1:41234/v1, which those in this
        process and its children reach without a proxy. `port`: 0 for any that is free. `address`: the host that clients
        get; empty: `host`."""
        self._runner = web.AppRunner(self._app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        raise_limit()
        made = self._heads.before(self._runner.server)
        self._listening = await asyncio.get_running_loop().create_server(made, host, port, backlog=BACKLOG)
        shown = address or host
        bypass_proxy(shown)
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self._listening.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._heads.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        sampler = self._sampler(request)
        names = sampler.policies if sampler.speaker else ("policy",)
        return web.json_response(_model_list(names, int(time.time())))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        sampler = self._sampler(request)
        asked = await _read_request(request, MESSAGES, {})
        return web.json_response({"input_tokens": sampler.count(asked.messages, asked.tools)})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        protocol = PROTOCOLS[_path(request)]
        sampler = self._sampler(request)
        answers = self._answers.setdefault(sampler, _AttemptAnswers(_tag(request)))
        asked = await _read_request(request, protocol, answers.responses)
        self._report_ignored(asked.ignored, sampler)
        is_retry = request.headers.get(RETRIES, "0") != "0"
        writer = _AnswerWriter(request, protocol, asked, answers, self._waiting_s)
        async with _sampling(sampler, asked, is_retry, answers) as sampling:
            return await writer.written(sampling)

    def _report_ignored(self, ignored: Sequence[str], sampler: TurnSampler) -> None:
        """Count options that have no effect, and report each once."""
        sampler.counts["ignored_options"] += len(ignored)
        for name in ignored:
            if name not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(name)
                _LOG.warning("agents send the option %.100r, which has no effect on the policy", name)

    def _sampler(self, request: web.Request) -> TurnSampler:
        key = _key(request)
        if not key:
            raise _RequestRefused(NO_KEY)
        sampler = self._keys.sampler_of(key)
        if sampler is None:
            raise _RequestRefused(UNKNOWN_KEY)
        return sampler


async def _read_request(
    request: web.Request, protocol: ClientProtocol, responses: Mapping[str, Sequence[Message]]
) -> ClientRequest:
    """What a request asks for. A large body, and pictures, are read beside the loop."""
    body = await request.read()

    def read() -> ClientRequest:
        asked = protocol.request_of(parsed(body), responses)
        return replace(asked, messages=kept(asked.messages))

    is_large = len(body) > LARGE_BYTES or b"image" in body or responses
    return await asyncio.to_thread(read) if is_large else read()


class _RequestRefused(Exception):
    """The error that ends a request with a failure for the client."""

    def __init__(self, failure: ClientFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@asynccontextmanager
async def _sampling(
    sampler: TurnSampler, asked: ClientRequest, is_retry: bool, answers: _AttemptAnswers
) -> AsyncIterator["asyncio.Future[Turn]"]:
    """Sample a turn. Unless it is among those delivered at the end, it is forgotten, as if it had never been
    sampled."""
    policy = asked.model if asked.model in sampler.policies else None
    sampling = asyncio.ensure_future(
        sampler.sample(asked.messages, asked.tools, is_client=True, is_retry=is_retry, policy=policy, **asked.options)
    )  # fmt: skip
    try:
        yield sampling
    finally:
        if not sampling.done():
            sampling.cancel()
        elif not sampling.cancelled() and sampling.exception() is None:
            turn = sampling.result()
            if turn.id not in answers.delivered:
                sampler.forget(turn)


@dataclass(frozen=True)
class _AnswerWriter:
    """Writer of the answer to one request."""

    request: web.Request
    protocol: ClientProtocol
    asked: ClientRequest
    answers: _AttemptAnswers
    waiting_s: float

    async def written(self, sampling: "asyncio.Future[Turn]") -> web.StreamResponse:
        """Write the answer. Raises what `sampling` raises, as long as nothing is written."""
        return await (self._stream(sampling) if self.asked.is_streamed else self._whole(sampling))

    async def _whole(self, sampling: "asyncio.Future[Turn]") -> web.StreamResponse:
        await asyncio.wait([sampling])
        turn = _result(sampling)
        response = web.json_response(self.protocol.answer(self.asked, turn, self.answers.tag))
        await response.prepare(self.request)
        await response.write_eof()
        self._delivered(turn)
        return response

    async def _stream(self, sampling: "asyncio.Future[Turn]") -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        while not (await asyncio.wait([sampling], timeout=self.waiting_s))[0]:
            if not response.prepared:
                await response.prepare(self.request)
            await response.write(self.protocol.waiting)
        if response.prepared and not sampling.cancelled() and (error := sampling.exception()) is not None:
            return await self._ended_with(response, error)
        turn = _result(sampling)
        events = [event.encode() for event in self.protocol.events(self.asked, turn, self.answers.tag)]
        if not response.prepared:
            await response.prepare(self.request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        self._delivered(turn)
        return response

    async def _ended_with(self, response: web.StreamResponse, error: BaseException) -> web.StreamResponse:
        shape = self.protocol.error(failure_of(error))
        await response.write(ServerSentEvent(shape, self.protocol.error_event).encode())
        await response.write_eof()
        return response

    def _delivered(self, turn: Turn) -> None:
        self.answers.delivered.add(turn.id)
        if self.asked.kept is not None and self.protocol.answer_id is not None:
            name = self.protocol.answer_id(turn, self.answers.tag)
            self.answers.responses[name] = [*self.asked.kept, turn.message]


def _result(sampling: "asyncio.Future[Turn]") -> Turn:
    if sampling.cancelled():
        raise AttemptOver("the attempt ended while the turn was sampled")
    return sampling.result()


@web.middleware
async def _answer_failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every failure in the form of the protocol. A failure that no client can receive is not raised again."""
    try:
        return await handler(request)
    except _RequestRefused as refused:
        return _failure_response(request, refused.failure)
    except web.HTTPException as error:
        return _failure_response(request, _http_failure(request, error))
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
        failure = failure_of(error)
        if failure.status == 500:
            _LOG.exception("the gateway could not answer %s", request.path)
        return _failure_response(request, failure)


def _http_failure(request: web.Request, error: web.HTTPException) -> ClientFailure:
    if error.status == 404:
        paths = ", ".join((*PROTOCOLS, COUNT, MODELS))
        return ClientFailure(404, "not_found", f"There is nothing at {request.path}. There is: {paths}.")
    if error.status == 413:
        return ClientFailure(413, "request_too_large", f"{TOO_LARGE} {error.text or ''}".strip())
    return ClientFailure(error.status, "invalid_request", f"{request.method} {request.path}: {error.reason}.")


def _failure_response(request: web.Request, failure: ClientFailure) -> web.Response:
    body = json.dumps(error_shape(_path(request), request.headers)(failure))
    response = web.Response(text=body, status=failure.status, content_type="application/json", headers=failure.headers)
    if failure.status == 401:
        response.force_close()
    return response


def _path(request: web.Request) -> str:
    return request.path.removeprefix(VERSION) if request.path.startswith(2 * VERSION + "/") else request.path


def _key(request: web.Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token else request.headers.get("x-api-key", "")


def _tag(request: web.Request) -> str:
    return hashlib.blake2b(_key(request).encode(), digest_size=6).hexdigest()


def _model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """The list of models, the policies, in the form of both protocols. Any other name in a request means the one that
    answers where none is named."""
    models = [
        {
            "id": name, "object": "model", "created": created, "owned_by": "penstock",
            "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
        }
        for name in names
    ]  # fmt: skip
    return {"object": "list", "data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def advertised_host(gateway: GatewayConfig, node: str) -> str:
    """The host by which agents reach the gateway. `node`: the address of this node for other nodes."""
    return gateway.address or (node if gateway.host in EVERY_INTERFACE else gateway.host)
