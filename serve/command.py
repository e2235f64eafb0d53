"""`penstock serve`: from the configuration to the end of the server.

The state of clients is in the run's directory: the next server of that name continues where a killed one stopped. The
HTTP server starts on that directory, and ends without losing an accepted request:

    server = Server(config, backend, directory)
    url = await server.start()
    await server.serve_until(stop)        # an event; then drain
"""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.capabilities import ROLLOUT_ENGINES, names_with
from penstock.conf.errors import ConfigError, PenstockError, is_refusal
from penstock.conf.run import RunConfig, validate
from penstock.conf.serve import ServeConfig, hash_of
from penstock.conf.trainer import LoraConfig
from penstock.metering.meters import Meters
from penstock.metering.ray_export import exporting
from penstock.network.host import raise_limit
from penstock.network.listener import BACKLOG, CONNECTIONS, Heads, listen
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.actors import origin_of, plan_actors
from penstock.orchestrator.cluster.ray_cluster import namespace_of, raise_if_over
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.configuration.validate import MEMORY, PACKAGES, RESOURCES, checks
from penstock.orchestrator.control.process import run
from penstock.orchestrator.observability.runs.found import SERVING
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.orchestrator.session import started_fleet
from penstock.orchestrator.signals import ending
from penstock.serve.backend import Backend, ModelFacts
from penstock.serve.cluster_backend import ClusterBackend
from penstock.serve.endpoints import routes
from penstock.serve.sdk_messages import messages
from penstock.serve.service import Service, status
from penstock.serve.tenants import OPERATOR, Tenants
from penstock.workers.protocols import WHOLE
from penstock.workers.runtime.local_files import write_whole
from penstock.workers.runtime.url_files import is_url

_LOG = logging.getLogger("penstock")
CLOSE_S, GRACE_S = 2.0, 2
"""Seconds beyond `serve.drain_s` for files to be closed, and for answers that are being written."""
START_S = 30.0


class ServerFailed(PenstockError):
    """A part of the server that has ended by a fault."""


class Server:
    """Lifecycle: `start`, `serve_until` or `drain`."""

    def __init__(
        self, config: ServeConfig, backend: Backend, directory: Path, key: str = "", meters: Meters | None = None
    ) -> None:
        """`directory`: in that of the run, which this process has locked; the state of the server before is continued.
        `key`: of the only tenant, or of the operator where there are tenants. `meters`: take what is measured. Raises
        `ConfigError`."""
        messages()
        self._meters = meters
        self._config, self._backend, self._directory = config, backend, directory
        self.key, self.key_file = key, directory / "key.sha256"
        """The key of the only tenant, or of the operator; empty: an earlier start has printed it."""
        self.service: Service | None = None
        self._http: _Http | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start; returns the address for TINKER_BASE_URL. Raises `ConfigError` if the port is in use."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        known = self.key_file.read_text() if self.key_file.exists() else ""
        tenants = Tenants(self._config, self.key, known, self._meters)
        is_made, self.key = tenants.key != self.key, tenants.key
        self._heads = Heads(most_open=min(CONNECTIONS, raise_limit() // 2), holder=tenants.holder)
        bound = listen(self._config.host, [self._config.port])
        self.service = Service(self._config, self._backend, self._directory, tenants)
        await self.service.open()
        config = uvicorn.Config(
            Starlette(routes=routes(self.service)), log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=60, backlog=BACKLOG,
            http=self._heads.before(H11Protocol),
        )  # fmt: skip
        self._http = _Http(config)
        self._serving = asyncio.create_task(self._http.serve([bound]), name="HTTP")
        async with asyncio.timeout(START_S):
            while not self._http.started:
                await asyncio.sleep(0.01)
        if is_made:
            write_whole(self.key_file, hash_of(self.key), synced=True)
        host = self._config.host if self._config.host not in ("0.0.0.0", "::") else socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound.getsockname()[1]}"

    async def serve_until(self, stop: asyncio.Event, *beside: "asyncio.Task[None]") -> None:
        """Serve until the event is set, then drain. Raises `ServerFailed` once a part has ended, or a task beside."""
        assert self.service is not None
        assert self._serving is not None
        parts = [*self.service.loops, self._serving, *beside]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        ended = [(part.get_name(), part.exception()) for part in parts if part.done()]
        await self.drain()
        for name, error in ended:
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            raise ServerFailed(
                f"{name} has ended{why}. Start the server again with the same name=: it goes on with every client."
            ) from error

    async def drain(self) -> None:
        """End: take no more requests, finish those under way within `serve.drain_s`, write what adapters are. What is
        not done then is in the journals."""
        try:
            async with asyncio.timeout(self._config.drain_s + CLOSE_S):
                if self.service is not None:
                    await self.service.close()
        except TimeoutError:
            _LOG.warning("Not all files were closed within serve.drain_s and %g s. The next start goes on.", CLOSE_S)
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.wait([self._serving], timeout=1.5 * GRACE_S)
            self._heads.close()

    def status(self) -> dict[str, Any]:
        """Tenants, their training clients, queues, and what each waits for, as plain data."""
        return status(self.service, OPERATOR) if self.service is not None else {}


class _Http(uvicorn.Server):
    """The HTTP server, which leaves signals to who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


STATUS_EVERY_S = 2.0
"""Seconds between two writes of the server's status."""
FLEET_S = 2.0
"""Longest grace for ranks and engines at the end: all of their state is on the disk."""
DEFAULT_NAME = "serve"
DEFAULT_RANK = 32
"""Largest rank where none is configured: the one that the SDK asks for by default."""
ROLES = ("store", "rollout", "trainer")
"""Roles of the plan that a server has actors of; the store's is never started."""


def serve(config: RunConfig, key: str, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT, and drain. `key`: empty: one is made. Raises `ConfigError`, `ModelError`,
    `ResourceError`, `RunInUse` before anything listens."""
    own = server_config(config)
    validate(own)
    flow = Dataflow().rollout("policy", samples_per_prompt=1).train("policy", loss=_by_request).check()
    asked = ResolvedRun(own, flow, [actor for actor in plan_actors(flow, own) if actor.role in ROLES])
    for check in checks(asked):
        if check.name in (RESOURCES, MEMORY, PACKAGES, "model"):
            check.look()
    directory = _open_directory(own)
    directory.failed_writes.set_printer(tell)
    try:
        with started_fleet(asked, directory) as fleet:
            run(_run_server(fleet, directory, key, tell), raise_if_over)
        directory.event("end")
    except BaseException as error:
        if is_refusal(error) and directory.is_unused:
            directory.discard()
            raise
        directory.event("failed", error=type(error).__name__, message=str(error))
        raise
    finally:
        directory.close()


def server_config(config: RunConfig) -> RunConfig:
    """The configuration of a server: without what only a run has. Raises `ConfigError` for what a server cannot do."""
    if not config.rollout.capabilities.serves_adapters:
        names = names_with("serves_adapters", ROLLOUT_ENGINES)
        raise ConfigError(f"rollout.engine={config.rollout.engine}: a server samples by {names}.")
    if config.placement != "disaggregated":
        raise ConfigError(
            f"placement={config.placement}: a server trains for one client while it samples for another. Leave "
            "placement out, and give engines and ranks GPUs of their own."
        )
    if is_url(config.output_dir):
        raise ConfigError(
            f"output_dir={config.output_dir}: the state of clients is written at every request. Name a directory, one "
            "that outlives the machine if the server may move."
        )
    if config.trainer.lora.rank:
        raise ConfigError("trainer.lora.rank: clients choose the rank of their adapters. Set serve.max_rank.")
    grace_s = min(FLEET_S, config.cluster.shutdown_timeout_s)
    cluster = replace(config.cluster, shutdown_timeout_s=grace_s)
    named = replace(config, name=config.name or DEFAULT_NAME, cluster=cluster)
    if config.serve.full:
        return replace(named, serve=replace(config.serve, max_loaded=1, max_resident=1))
    rank = config.serve.max_rank or DEFAULT_RANK
    trainer = replace(config.trainer, lora=LoraConfig(rank=rank, publish="adapter"))  # what memory is counted for
    return replace(named, serve=replace(config.serve, max_rank=rank), trainer=trainer)


def _by_request(logprobs: Any, mask: Any) -> Any:
    """Stand for the losses, which come with each request."""
    raise NotImplementedError("a server's ranks get their loss with each request.")


def _open_directory(config: RunConfig) -> RunDirectory:
    """The directory of the server, locked: a new one, or that of the server before. Raises `ConfigError`,
    `RunInUse`."""
    place = RunPlace.of_run(config)
    if not (place.path / "config.yaml").is_file():
        directory = RunDirectory.create(config)
        directory.event("start", serves=config.model.path)
        return directory
    directory = RunDirectory.open(place.path)
    directory.lock(place.path, f"name={config.name}")
    directory.event("resume", serves=config.model.path)
    return directory


async def _run_server(fleet: Fleet, directory: RunDirectory, key: str, tell: Callable[[str], None]) -> None:
    """Serve until a signal, then drain."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (*ending(), signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    facts = await asyncio.to_thread(model_facts, fleet)
    backend = ClusterBackend(fleet, fleet.config, facts, directory, tell)
    with exporting(origin_of(fleet.config, namespace_of(directory), "serve", "Server")) as meters:
        server = Server(fleet.config.serve, backend, directory.path / "serve", key, meters)
        url = await server.start()
        tell(f"{facts.name} is served: TINKER_BASE_URL={url} TINKER_API_KEY={'…' if key else server.key or '…'}")
        if not server.key:
            tell(f"The first start has printed the key. For a new one remove {server.key_file}, and start again.")
        status_task = asyncio.create_task(
            _write_status(server, backend, directory, url), name="the status for penstock ui"
        )
        try:
            await server.serve_until(stop, status_task)
        finally:
            status_task.cancel()


async def _write_status(server: Server, backend: ClusterBackend, directory: RunDirectory, url: str) -> None:
    """Write the server's status every `STATUS_EVERY_S`, for `penstock ui`."""
    while True:
        state = {"time": time.time(), "url": url, **server.status(), "losses_of_engines": backend.num_lost}
        with directory.failed_writes.tolerating("state", is_cumulative=True):
            await asyncio.to_thread(write_whole, directory.path / SERVING, json.dumps(state))
        await asyncio.sleep(STATUS_EVERY_S)


def model_facts(fleet: Fleet) -> ModelFacts:
    """The base model, as clients see it."""
    from transformers import AutoConfig

    config, path = fleet.config, fleet.model_path
    model = AutoConfig.from_pretrained(path).get_text_config()
    given = config.model.path or path
    name = config.serve.model_name or (Path(given).name if Path(given).is_dir() else given)
    longest = config.rollout.max_model_len - 1  # engines want room for a sampled token, also where a prompt is scored
    return ModelFacts(name, path, longest, int(model.vocab_size), config.serve.slot_rank or WHOLE)
