"""`penstock serve`: from the configuration to the end of the server.

The state of its clients lives in the run's directory: a server that is killed goes on where it was with the next one of
that name.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError, is_refusal
from penstock.conf.run import RunConfig, validate
from penstock.conf.trainer import LoraConfig
from penstock.metering.ray_export import exporting
from penstock.orchestrator.cluster.cluster import namespace_of, raise_if_over
from penstock.orchestrator.cluster.placement.actors import origin_of, plan_actors
from penstock.orchestrator.configuration.validate import MEMORY, RESOURCES, checks
from penstock.orchestrator.control.process import run
from penstock.orchestrator.observability.runs.found import SERVING
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.orchestrator.signals import ending
from penstock.orchestrator.storeless import StorelessFleet, started_fleet
from penstock.serve.actors.backend import ClusterBackend
from penstock.serve.backend import ModelFacts
from penstock.serve.server import Server
from penstock.workers.calls.training_calls import WHOLE
from penstock.workers.machine.files import is_url
from penstock.workers.machine.local_files import write_whole

TOLD_EVERY_S = 2.0
"""Seconds between two times that the server writes what it is doing."""
FLEET_S = 2.0
"""Most grace for ranks and engines at the end: they have nothing that is not on the disk."""
DEFAULT_NAME = "serve"
DEFAULT_RANK = 32
"""Largest rank where none is configured: the one that the SDK asks for by default."""
ROLES = ("store", "rollout", "trainer")
"""Roles of the plan that a server has actors of; the store's is never started."""


def serve(config: RunConfig, key: str, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT, and drain. `key`: empty: one is made. Raises `ConfigError`, `ModelError`,
    `ResourceError`, `RunInUse` before anything listens."""
    config = served(config)
    validate(config)
    flow = Dataflow().rollout("policy", samples_per_prompt=1).train("policy", loss=_by_request).check()
    plan = [actor for actor in plan_actors(flow, config) if actor.role in ROLES]
    for check in checks(config, flow, plan):
        if check.name in (RESOURCES, MEMORY, "model"):
            check.look()
    directory = _opened(config)
    directory.failed_writes.tell_to(tell)
    try:
        with started_fleet(config, flow, plan, directory) as started:
            run(_serving(started, directory, key, tell), raise_if_over)
        directory.event("end")
    except BaseException as error:
        if is_refusal(error) and directory.is_unused:
            directory.discard()
            raise
        directory.event("failed", error=type(error).__name__, message=str(error))
        raise
    finally:
        directory.close()


def served(config: RunConfig) -> RunConfig:
    """The configuration of a server: without what only a run has. Raises `ConfigError` for what a server cannot do."""
    if config.rollout.engine not in ("vllm", "hf"):
        raise ConfigError(f"rollout.engine={config.rollout.engine}: a server samples by vllm or hf.")
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
    config = replace(config, name=config.name or DEFAULT_NAME, cluster=cluster)
    if config.serve.full:
        return replace(config, serve=replace(config.serve, max_loaded=1, max_resident=1))
    rank = config.serve.max_rank or DEFAULT_RANK
    return replace(
        config,
        serve=replace(config.serve, max_rank=rank),
        trainer=replace(config.trainer, lora=LoraConfig(rank=rank, publish="adapter")),  # what memory is counted for
    )


def _by_request(logprobs: Any, mask: Any) -> Any:
    """Stand for the losses, which come with each request."""
    raise NotImplementedError("a server's ranks get their loss with each request.")


def _opened(config: RunConfig) -> RunDirectory:
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


async def _serving(started: StorelessFleet, directory: RunDirectory, key: str, tell: Callable[[str], None]) -> None:
    """Serve until a signal, then drain."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (*ending(), signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    facts = await asyncio.to_thread(facts_of, started)
    backend = ClusterBackend(started.fleet, started.config, facts, directory, tell)
    with exporting(origin_of(started.config, namespace_of(directory), "serve", "Server")) as meters:
        server = Server(started.config.serve, backend, directory.path / "serve", key, meters)
        url = await server.start()
        tell(f"{facts.name} is served: TINKER_BASE_URL={url} TINKER_API_KEY={'…' if key else server.key or '…'}")
        if not server.key:
            tell(f"The first start has printed the key. For a new one remove {server.key_file}, and start again.")
        told = asyncio.create_task(_telling(server, backend, directory, url), name="the status for penstock ui")
        try:
            await server.serve_until(stop, told)
        finally:
            told.cancel()


async def _telling(server: Server, backend: ClusterBackend, directory: RunDirectory, url: str) -> None:
    """Write what the server is doing again and again, for `penstock ui`."""
    while True:
        state = {"time": time.time(), "url": url, **server.status(), "losses_of_engines": backend.num_lost}
        with directory.failed_writes.tolerating("state", is_renewed=True):
            await asyncio.to_thread(write_whole, directory.path / SERVING, json.dumps(state))
        await asyncio.sleep(TOLD_EVERY_S)


def facts_of(started: StorelessFleet) -> ModelFacts:
    """The base model, as clients are told of it."""
    from transformers import AutoConfig

    config, path = started.config, started.model_path
    model = AutoConfig.from_pretrained(path).get_text_config()
    given = config.model.path or path
    name = config.serve.model_name or (Path(given).name if Path(given).is_dir() else given)
    longest = config.rollout.max_model_len - 1  # engines want room for a sampled token, also where a prompt is scored
    return ModelFacts(name, path, longest, int(model.vocab_size), config.serve.slot_rank or WHOLE)
