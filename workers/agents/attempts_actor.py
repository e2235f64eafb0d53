"""`Environment-i`: the Ray shell around one environment, its attempts, and the gateway to the engines.

The controller names the engines by `engines`, whenever they change; `run` leases tasks from a store until it closes;
`play` serves evaluation.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import DataError, PenstockError, WorkerDied
from penstock.conf.rollout import RolloutConfig
from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.metering.ray_export import Origin, exported
from penstock.workers.agents.admission import AdmissionControl, AttemptGate, TurnShape
from penstock.workers.agents.attempts import (
    ERROR_WINDOW,
    AttemptColumns,
    AttemptResult,
    AttemptRunner,
    EnvironmentWorker,
    MakeSampler,
)
from penstock.workers.agents.environment import Task, make_environment
from penstock.workers.agents.gateway.chat_formats import make_format
from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer, advertised_host
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, KvLoad, Sampling
from penstock.workers.rollout.rollout_worker import GroupIntake
from penstock.workers.runtime.async_tasks import cancel_all, contained_task_factory
from penstock.workers.runtime.processes import children, end_children
from penstock.workers.runtime.serving import ErrorShare, Progress, ServingActor
from penstock.workers.sandbox.disk import prepare

REPORT_S, REPORTS_PER_S = 1.0, 200
"""Least number of seconds between two reports of the engines; reports a second of all engines to all actors, above
which they come less often: a call takes an engine and an actor 0.3 ms each."""
KV_LOAD_S = 10.0
"""Longest wait for an engine's report, in seconds."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The specification that an environment actor is made from. Plain data, so that it can be sent through Ray."""

    name: str
    index: int
    """Index among the environment actors."""
    config: EnvironmentConfig
    rollout: RolloutConfig
    model_path: str
    """Directory of the tokenizer."""
    seed: int
    group_size: int
    columns: AttemptColumns
    imports: tuple[str, ...] = ()
    num_peers: int = 1
    """Number of environment actors, itself included."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template: `model.chat_template_kwargs`."""
    picture_digest: str | None = None
    """Digest of the processor of the run's pictures (`workers/pictures/`); None: the run is one of text."""
    origin: Origin | None = None
    """Origin of its measurements; None: they are not exported."""
    policies: tuple[str, ...] = ()
    """Names of the policies that are trained."""
    speaker: str = ""
    """Policy that answers where a request names none; empty: there is one."""
    policy_of: Mapping[str, str] = field(default_factory=dict)
    """Policy whose model each engine has, by the engine's name; empty: each has all."""


class Environments(ServingActor):
    """Lifecycle: that of every `ServingActor`; `engines` whenever they change, `play` concurrently with `run`."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        super().__init__(spec.name)
        self._spec = spec
        self._counts: Counter[str] = Counter()
        self._make_pool = partial(EnginePool, ask, spec.rollout.generate_timeout_s, policies=spec.policy_of)
        self._pool = self._make_pool()
        self._has_list = False
        """True once the controller has named the run's engines, also where there was none."""
        admission = AdmissionControl(spec.config.max_attempts, spec.num_peers, follows=True)
        self._gate = AttemptGate(admission, spec.config.timeout_s)
        self._num_preempted: dict[str, int] = {}
        """Samples that each engine has preempted."""
        self._following: asyncio.Task[None] | None = None
        self._keys = AttemptKeys()
        self._server = HttpServer(self._keys)
        self.runner: AttemptRunner | None = None
        self._make_runner: Callable[[Mapping[str, Any]], AttemptRunner] | None = None
        self._make_sampler: Callable[..., TurnSampler] | None = None
        self._of_sets: dict[str, AttemptRunner] = {}
        """Runners of evaluation's sets, by what these change of the environment's options."""
        self._others = children()  # of this process, which the environment did not start

    async def start(self) -> None:
        """Make the environment and start the gateway. Raises `ConfigError` for an environment that cannot be made and a
        disk that cannot be used, `ModelError` for a model that cannot chat."""
        spec, config = self._spec, self._spec.config
        if config.workspace_disk is not None:
            await asyncio.to_thread(prepare, Path(config.workspace_disk))
        asyncio.get_running_loop().set_task_factory(contained_task_factory)
        tokenizer = await asyncio.to_thread(load_tokenizer, spec.model_path)
        rollout, digest = spec.rollout, spec.picture_digest
        processor = PictureProcessor.of(spec.model_path, digest) if rollout.max_pictures else None
        form = make_format(tokenizer, config.gateway, spec.chat_template_kwargs, sees=processor is not None)
        limits = TurnLimits(config.max_turns, config.max_tokens, rollout.max_model_len, rollout.max_pictures)

        meters = exported(spec.origin)

        def make_sampler(sampling: Sampling, pool: EnginePool = self._pool) -> TurnSampler:
            return TurnSampler(
                pool, form, replace(sampling, policy=spec.speaker), limits, counts=self._counts,
                clients_sample=config.gateway.sampling == "client", processor=processor, policies=spec.policies,
            )  # fmt: skip

        def make_runner(changes: Mapping[str, Any]) -> AttemptRunner:
            changed = replace(config, options={**config.options, **changes})
            environment = make_environment(changed, spec.imports)
            return AttemptRunner(
                environment, config, make_sampler, self._keys, counts=self._counts, meters=meters, gate=self._gate
            )

        self._make_runner, self._make_sampler = make_runner, make_sampler
        port = config.gateway.port + spec.index if config.gateway.port else 0
        host = advertised_host(config.gateway, ray.util.get_node_ip_address())
        self._keys.base_url = await self._server.start(config.gateway.host, port, host)
        self.runner = make_runner({})
        sampling = spec.rollout.sampling
        intake = GroupIntake(
            spec.name, Sampling.of(sampling), spec.seed if sampling.seeded else None,
            spec.group_size, config.max_attempts, spec.num_peers, spec.rollout.truncated_to("drop"),
            room=lambda: self._gate.room,
        )  # fmt: skip
        errors = ErrorShare(config.max_error_share, ERROR_WINDOW, "attempts", "environment")
        trained = spec.policies if spec.speaker else ("",)
        self._worker = EnvironmentWorker(self.runner, intake, errors, spec.columns, trained)
        self._following = asyncio.create_task(self._follow_engines(meters))
        await super().start()

    async def engines(self, members: Sequence[tuple[str, Any]]) -> None:
        """Set the rollout actors that serve now, by names and handles."""
        self._has_list = True
        await self._use(dict(members))

    async def play(self, *arguments: Any, **options: Any) -> list[list[AttemptResult]]:
        """Play a group of attempts at each task, as `trajectories` does. Returns what evaluation needs of each."""
        groups = await self.trajectories(*arguments, **options)
        return [[AttemptResult.of(attempt) for attempt in group] for group in groups]

    async def trajectories(
        self,
        engines: Sequence[tuple[str, Any]],
        tasks: Sequence[str],
        samplings: Sequence[Sequence[Sampling]],
        pictures: Sequence[PromptPictures | None] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[list[Trajectory]]:
        """Play a group of attempts at each task (the `task` column), one for each of its samplings. `pictures`: of each
        task; none in a run of text. `options`: what is changed of the environment's. Raises `ConfigError` for options
        that it cannot be made with."""
        runner, make_sampler = self._runner_of(options or {}), await self._sampler_over(dict(engines))
        seen = [() if one is None else one.encoded for one in pictures or [None] * len(tasks)]
        found = map(Task.from_json, tasks, seen)
        groups = (runner.group(task, own, make_sampler) for task, own in zip(found, samplings, strict=True))
        return list(await asyncio.gather(*groups))

    async def progress(self) -> Progress:
        """Attempts played, and those under way. May be called at any time."""
        runner = self.runner
        return self._phases.progress(runner.num_done, runner.num_in_flight) if runner is not None else Progress("", 0.0)

    async def stats(self) -> dict[str, float]:
        """Counters of the groups, like those of an engine; and counts of the gateway, of tools and of outcomes since
        the start."""
        own = {f"environment/{name}": float(count) for name, count in self._counts.items()}
        own["environment/turns_again"] = float(self._pool.num_again)
        if not self._spec.index:  # all actors have the same engines
            own["environment/samples_preempted"] = float(sum(self._num_preempted.values()))
        return {**await super().stats(), **own}

    async def close(self) -> None:
        if self._following is not None:
            await cancel_all([self._following])
        await self._server.stop()
        for runner in (self.runner, *self._of_sets.values()):
            if runner is not None:
                await runner.close()
        end_children(but=self._others)

    async def _use(self, engines: Mapping[str, Any]) -> None:
        """Set the run's engines. Where nothing is known of their memory yet, they are asked first."""
        self._pool.update(engines)
        if not self._gate.control.has_report:
            await self._report()

    async def _follow_engines(self, meters: Meters) -> None:
        """Fit the number of attempts to the engines' memory, once a second at most."""
        while True:
            await asyncio.sleep(max(REPORT_S, len(self._pool.members) * self._spec.num_peers / REPORTS_PER_S))
            await self._report()
            meters.put(table.ENVIRONMENT_UNDER_WAY, self._gate.num_under_way)
            meters.put(table.ENVIRONMENT_LIMIT, self._gate.limit)

    async def _report(self) -> None:
        """Take the engines' reports. One that does not answer counts as one that is not there."""
        members = self._pool.members
        found = await asyncio.gather(*map(kv_load, members.values()), return_exceptions=True)
        loads = {name: load for name, load in zip(members, found, strict=True) if not isinstance(load, BaseException)}
        for name, load in loads.items():
            self._num_preempted[name] = load.num_preempted if load is not None else 0
        num_sampled = max(1, self._counts["tokens_sampled"])
        shape = TurnShape(self._counts["tokens_added"] / num_sampled, self._counts["tokens_continued"] / num_sampled)
        self._gate.report(loads, self._pool, shape)

    async def _sampler_over(self, engines: Mapping[str, Any]) -> MakeSampler | None:
        """What makes samplers over engines that no attempt of the run may use, as they are an evaluation's and have
        another version. None: they are the run's engines from now on."""
        if not self._has_list or self._pool.names & engines.keys():
            await self._use(engines)
            return None
        assert self._make_sampler is not None
        pool = self._make_pool()
        pool.update(engines)
        return partial(self._make_sampler, pool=pool)

    def _runner_of(self, options: Mapping[str, Any]) -> AttemptRunner:
        """The runner of the environment with these options changed, which is made where it is first asked for."""
        assert self.runner is not None
        assert self._make_runner is not None
        if not options:
            return self.runner
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._of_sets:
            self._of_sets[key] = self._make_runner(options)
        return self._of_sets[key]


async def kv_load(handle: Any) -> KvLoad | None:
    """The load of the memory of the engine behind a handle. Raises `TimeoutError`, and Ray's errors."""
    found: KvLoad | None = await asyncio.wait_for(handle.kv_load.remote(), KV_LOAD_S)
    return found


async def ask(
    handle: Any, prompt_ids: Sequence[int], sampling: Sampling, pictures: PromptPictures | None = None
) -> Completion:
    """Sample a response of the engine behind a handle. A call that is cancelled ends there, too. Raises `WorkerDied`
    for an engine that is gone, `DataError` for a request that makes it fail or whose log-probabilities are not finite,
    and what it raises of Penstock's errors."""
    seen = () if pictures is None else ([pictures],)
    asked = handle.generate.remote([list(prompt_ids)], 1, [sampling], *seen)
    try:
        ((completion,),) = await asked
        if not completion.is_finite:
            raise DataError(await handle.fault_of.remote(list(prompt_ids), completion))
    except asyncio.CancelledError:
        ray.cancel(asked, recursive=False)  # otherwise the engine decodes it to its end
        raise
    except PenstockError:  # Ray raises an error of the actor's as one of its class, too
        raise
    except RayActorError as error:
        raise WorkerDied(f"an engine died in a turn: {error}") from None
    except RayTaskError as error:  # it lives, and would fail at the same request again
        raise DataError(f"an engine failed at a turn: {error.cause!r:.300}") from None
    except RayError as error:
        raise WorkerDied(f"an engine could not be asked for a turn: {error}") from None
    return completion
