"""Checks all that can be wrong with a run and can be known without starting it.

`check_run` is the last thing that `run` does before it makes a directory: the first fault ends it. `penstock validate`
shows the same checks one by one, with the resolved configuration, the dataflow, the actors on the nodes of the present
cluster, and their memory; and it tries the rewards on a row of the data, so that what a reward raises is seen before
anything is sampled. A cluster's nodes are asked for shared memory when the run starts (`cluster/node_agents.py`).
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.describe import draw
from penstock.algorithms.graph.loss import check_loss
from penstock.algorithms.graph.stage import Stage
from penstock.conf.data import ENVIRONMENT
from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import ConfigError, PenstockError, ResourceError
from penstock.conf.reward import ENVIRONMENT_REWARD, JUDGE, has_own_judge
from penstock.conf.rollout import DRAFT
from penstock.conf.run import RunConfig, WarmStartConfig
from penstock.conf.weights import choose_transport, replaces_members
from penstock.orchestrator.cluster.placement.actors import ActorPlan, answers_are_needed, needed, reward_of
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign, too_small
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, titles
from penstock.orchestrator.cluster.ray_cluster import check_resources, is_elsewhere, look
from penstock.orchestrator.configuration.memory_view import MemoryView
from penstock.orchestrator.configuration.model_shape import fresh_shape
from penstock.orchestrator.configuration.prerequisites import (
    CHECKS,
    check_model,
    check_other_model,
    check_own_models,
    check_packages,
    check_sandbox,
    check_trackers,
    packages_of,
    processor_of,
    runs_code,
    starting_model_config,
    tokenizer_of,
)
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve, resolve_first
from penstock.orchestrator.run_directory.run_directory import to_yaml
from penstock.orchestrator.run_directory.run_place import try_place, working_copies
from penstock.store.data.roots import SHARED_MEMORY
from penstock.workers.agents.adapters.tools import Tools
from penstock.workers.agents.environment import make_environment
from penstock.workers.agents.gateway.chat_formats import make_format
from penstock.workers.agents.gateway.conversation import ConversationFormat
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.prompts.dataset_row import PromptDataset, RowNeeds, is_cut
from penstock.workers.prompts.opening import check_prompts, encoder_of, open_held_out, open_rows, rows_to_read
from penstock.workers.prompts.order import MOST_SHOWN, level_of
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import RewardError, RewardResult
from penstock.workers.reward.signatures import Response, name_of
from penstock.workers.runtime.url_files import is_url, list_names
from penstock.workers.trainer.checkpointing.plain_data import states_to_text
from penstock.workers.weights.publication.costs import (
    BUSES,
    PublicationTimes,
    SharedMemory,
    how_to_enlarge,
    publication_bytes,
    state_copy_bytes,
    stored_elements,
)
from penstock.workers.weights.publication.publication_files import MOST_THREADS

RESOURCES, MEMORY, PACKAGES = "resources", "memory", "packages"
RESPONSES = ("", "The answer is 4.")


@dataclass(frozen=True)
class Check:
    """A check: `look` returns what it found, in a few words, or raises a `PenstockError`."""

    name: str
    look: Callable[[], str]
    is_reported: bool = False
    """True if a run prints the result when it starts; otherwise only `penstock validate` does."""


def checks(run: ResolvedRun) -> Iterator[Check]:
    """All checks: those whose faults matter most first, cheap ones before expensive ones."""
    config, flow, plan = run.config, run.flow, run.plan
    yield Check(RESOURCES, lambda: _check_resources(config, plan))
    yield Check(MEMORY, lambda: MemoryView.of(run).summary())
    if packages_of(config, plan) and not is_elsewhere():  # nodes of a cluster have packages of their own
        yield Check(PACKAGES, lambda: check_packages(config, plan))
    if CHECKS.keys() & set(config.tracking.sinks):
        yield Check("trackers", lambda: check_trackers(config.tracking))
    yield Check("output_dir", lambda: _check_output_dir(config.output_dir))
    if any(actor.role == "rollout" for actor in plan):
        yield Check("weights", lambda: describe_weights(config))
    if config.rollout.follows_cluster:
        most = config.max_engines
        yield Check("engines", lambda: f"1 to {most}: as many as there is room for, and groups under way")
    yield Check("model", lambda: check_model(config, samples=any(actor.role == "rollout" for actor in plan)))
    if config.rollout.speculation.method == DRAFT:
        yield Check("draft model", lambda: check_other_model(config.model.paths[DRAFT], f"model.paths.{DRAFT}"))
    if config.trainer.own_models:
        yield Check("policies", lambda: check_own_models(config))
    scores_held_out = config.evaluation.every_steps and not flow.has_environment
    if any(stage.function is None for stage in flow.of_kind("reward")) or scores_held_out:
        yield Check("reward", lambda: _check_rewards(config))
    (train,) = flow.of_kind("train")
    for loss in train.losses:
        yield Check("loss", partial(check_loss, loss, flow.columns))
    if runs_code(config):
        yield Check("sandbox", lambda: check_sandbox(config), is_reported=not is_elsewhere())
    states = {stage.name: stage.state for stage in flow.stages if stage.state is not None}
    if states and config.checkpoint.every_steps:
        yield Check("states", lambda: _check_states(states))
    if flow.has_environment:
        yield Check("environment", lambda: _check_environment(config))
        yield Check("tool calls", lambda: _format_of(config).describe_tools(), is_reported=True)
    yield Check("data", lambda: _check_data(config, flow))
    if config.data.curriculum.by is not None:
        yield Check("curriculum", lambda: _check_curriculum(config, flow))
    if flow.rows_are in ("demonstrations", "preferences"):
        yield Check("rewritten turns", lambda: _describe_rewritten_turns(config, flow), is_reported=True)
    yield Check("rows left out", lambda: _count_left_out(config, flow), is_reported=True)
    others = [stage for stage in flow.stages if _needs_path(stage)]
    if others:
        yield Check("other models", lambda: ", ".join(_check_other_model(config, stage) for stage in others))
    if config.evaluation.every_steps:
        yield Check("held-out data", lambda: _check_data(config.with_held_out(), flow, held_out=True))
        for name in config.evaluation.sets:
            yield Check(f"held-out {name}", partial(_check_data, config.with_held_out(name), flow, held_out=True))
    for start in run.first_runs:
        name = "warm start" if start is config.warm_start else "first run"
        yield Check(name, partial(_check_first_run, start))


def trials(run: ResolvedRun) -> Iterator[Check]:
    """Checks that start processes, which `penstock validate` makes alone."""
    if run.flow.of_kind("reward") or (run.config.evaluation.every_steps and not run.flow.has_environment):
        yield Check("rewards tried", lambda: try_rewards(run.config, run.flow))


def check_run(run: ResolvedRun, tell: Callable[[str], None] | None = None) -> None:
    """Raise the first fault: `ConfigError`, `DataError`, `ModelError` or `ResourceError`. `tell`: called with what a
    run says of what was found."""
    for check in checks(run):
        found = check.look()
        if found and check.is_reported and tell is not None:
            tell(f"{check.name}: {found}")


def validate_run(config: RunConfig, console: Console) -> int:
    """Print all that is known of the run, and all its faults. Returns the exit code."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    console.rule("configuration", align="left")
    console.print(to_yaml(config).rstrip(), highlight=False, markup=False)
    run = resolve(config)
    console.rule("dataflow", align="left")
    say(draw(run.flow))
    view = PlacementView.of(run.plan, run.config)
    console.rule("actors", align="left")
    console.print(view.actors())
    if view.nodes:
        console.rule("nodes of the cluster", align="left")
        console.print(view.reserved())
    memory = MemoryView.of(run, view.nodes, view.assignment)
    show_memory(memory, console)
    console.rule("checks", align="left")
    seen = {MEMORY: memory.summary} | ({RESOURCES: view.summary} if view.is_of_cluster else {})
    exit_code, known = 0, dict[str, str]()
    for check in (*checks(run), *trials(run)):
        try:
            found = seen.get(check.name, check.look)()
        except PenstockError as error:
            exit_code = max(exit_code, error.exit_code)
            console.print(f"[red]✗[/] {check.name}: ", end="")
            first = known.setdefault(str(error), check.name)
            say(str(error) if first == check.name else f"as of {first}, above")
        else:
            console.print(f"[green]✓[/] {check.name}: ", end="")
            say(found or "none")
    return exit_code


def show_memory(memory: MemoryView, console: Console) -> None:
    """Print what devices and nodes hold at their peaks."""
    tables = [table for table in (memory.devices(), memory.hosts()) if table is not None]
    if tables:
        console.rule("memory at the peak", align="left")
    for table in tables:
        console.print(table)
        console.print()
    for remark in memory.remarks():
        console.print(remark, highlight=False, markup=False, soft_wrap=True)


# The placement of actors on the nodes of the present cluster.


@dataclass(frozen=True)
class PlacementView:
    plan: Sequence[ActorPlan]
    nodes: Sequence[Node] = ()
    """Nodes of the cluster, the driver's first. Empty without a cluster, and if it does not answer."""
    assignment: Assignment | None = None
    refused: ResourceError | None = None
    """The reason why there is no assignment."""
    wait_s: float = 0.0
    """Seconds that the run waits for nodes."""

    @classmethod
    def of(cls, plan: Sequence[ActorPlan], config: RunConfig) -> "PlacementView":
        nodes: Sequence[Node] = ()
        try:
            nodes = look() or ()
            return cls(plan, nodes, assign(plan, nodes, config) if nodes else None)
        except ResourceError as error:
            return cls(plan, nodes, refused=error, wait_s=config.cluster.wait_s)

    @property
    def is_of_cluster(self) -> bool:
        """True if there is a cluster; else the run starts a local Ray."""
        return bool(self.nodes or self.refused)

    def summary(self) -> str:
        """Describe the placement in a few words. Raises `ResourceError` for what cannot be placed."""
        if self.nodes and self.refused and self.wait_s:
            return f"the run waits for nodes for up to {self.wait_s:g} s (cluster.wait_s): {self.refused}"
        if self.assignment is None:
            raise self.refused or ResourceError("There is no cluster.")
        cpus, gpus = needed(self.plan)
        there = f"{len(self.assignment.nodes)} of the cluster's {len(self.nodes)} node(s)"
        return f"{len(self.plan)} actors on {there} reserve {cpus:g} logical CPU(s) and {gpus:g} GPU(s)"

    def actors(self) -> Table:
        """A table of the actors: what each reserves, and its node."""
        table = _table("actor", "stage", "CPUs", "GPUs", *(["node"] if self.assignment else []))
        names = titles(self.nodes)
        for actor in self.plan:
            node = [names[self.assignment.node_of[actor.name].id]] if self.assignment else []
            table.add_row(
                actor.name,
                ", ".join(filter(None, (actor.stage, actor.policy))),
                f"{actor.num_cpus:g}",
                f"{actor.num_gpus:g}",
                *node,
            )
        cpus, gpus = needed(self.plan)
        table.add_row("in all", "", f"{cpus:g}", f"{gpus:g}", style="bold")
        return table

    def reserved(self) -> Table:
        """A table of the cluster's nodes, and how much of each the run reserves."""
        table = _table("node", "address", "CPUs", "GPUs", "labels", "")
        names = titles(self.nodes)
        for index, node in enumerate(self.nodes):
            cpus, gpus = f"{node.cpus:g}", f"{node.gpus:g}"
            if self.assignment is not None:
                there = set(self.assignment.names_on(node))
                own = needed([actor for actor in self.plan if actor.name in there])
                cpus, gpus = f"{own[0]:g} of {cpus}", f"{own[1]:g} of {gpus}"
            labels = ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items()) if key != NODE_ID)
            table.add_row(names[node.id], node.address, cpus, gpus, labels, "" if index else "the driver's")
        return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column.endswith("PUs") else "left")
    return table


# What the checks find.


def _check_resources(config: RunConfig, plan: list[ActorPlan]) -> str:
    check_resources(plan, config)
    cpus, gpus = needed(plan)
    return f"{len(plan)} actors reserve {cpus:g} logical CPU(s) and {gpus:g} GPU(s) of a local Ray"


def _check_output_dir(place: str) -> str:
    """Check that runs can be made there; of a URL, that there is a file system for it which answers."""
    if is_url(place):
        try_place(working_copies(place), "XDG_CACHE_HOME")
        return f"{place} answers: {len(list_names(place))} runs are there"
    return str(try_place(place))


def _check_states(states: dict[str, Any]) -> str:
    """Check that a checkpoint can keep the states that per-batch functions start with."""
    states_to_text(states, states)
    return f"{', '.join(states)}: plain data, as checkpoints keep it"


def _check_rewards(config: RunConfig) -> str:
    named = [(one.function, one.options) for one in config.rewards if one.function != ENVIRONMENT_REWARD]
    for function, options in named if config.rewards else [(config.reward.function, config.reward.options)]:
        RewardSpec.of(function, options, tuple(config.imports)).check()
        if has_own_judge(function, options):
            _check_judge(config, options)
    what = " + ".join(f"{one.weight:g} · {one.title}" for one in config.rewards) or config.reward.function
    return f"{what}, {config.reward.num_processes} process(es), {config.reward.timeout_s:g} s a sample"


def _check_judge(config: RunConfig, options: Mapping[str, Any]) -> None:
    if config.reward.judge.rollout.capabilities.structure_options is None and options.get("structured", True):
        raise ConfigError(
            f"reward.judge.engine={config.reward.judge.engine}: it cannot be held to a JSON schema. Set structured: "
            "false in the judge's options, or reward.judge.engine=vllm."
        )
    path = config.model.paths.get(JUDGE)
    if (model := path or starting_model_config(config).path) is not None:
        check_other_model(model, f"model.paths.{JUDGE}" if path else "model.path", judge=config.reward.judge.rollout)
    make_format(load_tokenizer(path) if path is not None else tokenizer_of(config), GatewayConfig())


def _check_data(config: RunConfig, flow: Dataflow, *, held_out: bool = False) -> str:
    dataset = open_rows(config, held_out=held_out)
    if dataset is None:
        return "none"
    if flow.has_environment:
        return f"{len(dataset):,} tasks, such as {dataset.row(0).where}{_describe_unanswered(dataset, config)}"
    rows_are = "prompts" if held_out else flow.rows_are
    encoder = _encoder(config, rows_are)
    needs = _needs_of(config, flow, rows_are, held_out=held_out)
    report = check_prompts(dataset, encoder, config, rows_are=rows_are, needs=needs)
    found = f"{report.rows:,} rows, {report.read:,} read; longest prompt {report.longest_prompt} tokens"
    if report.longest_response:
        found += f", longest response {report.longest_response}"
    if report.left_out:
        found += f"; {report.left_out:,} without an answer and left out"
    elif report.unanswered:
        found += f"; {report.unanswered:,} without an answer, which nothing asks for"
    return found + (f"; {report.skipped} too long and left out" if report.skipped else "")


def _encoder(config: RunConfig, rows_are: str) -> Any:
    processor = processor_of(config) if config.rollout.max_pictures else None
    return encoder_of(config, tokenizer_of(config), processor, rows_are)


def _describe_rewritten_turns(config: RunConfig, flow: Dataflow) -> str:
    """Describe a chat template that writes an answered conversation otherwise than its prompt; empty: it does not."""
    try:
        dataset = open_rows(config)
    except PenstockError:  # the check of the data reports it
        return ""
    encoder = _encoder(config, flow.rows_are)
    if dataset is None or not encoder.is_rewritten(dataset.row(0)):
        return ""
    return (
        "the chat template begins an answered conversation with another text than the prompt, such as thinking that it "
        "opens there alone: responses follow what both begin with"
    )


def _needs_of(config: RunConfig, flow: Dataflow, rows_are: str, *, held_out: bool = False) -> RowNeeds:
    """What the run needs of each row. The check of rewards reports one that is not found."""
    needs_answer = False
    with suppress(ConfigError):
        needs_answer = answers_are_needed(flow, config, held_out=held_out)
    return RowNeeds.of(config.data, rows_are, needs_answer)


def _describe_unanswered(dataset: PromptDataset, config: RunConfig) -> str:
    """Describe how many tasks of a dataset have no answer."""
    if config.data.source == ENVIRONMENT or config.data.columns.answer is None:
        return ""
    lacking = sum(dataset.row(index).answer is None for index in range(rows_to_read(dataset, config)))
    return f"; {lacking:,} without an answer, which the environment is told as null" if lacking else ""


def _check_curriculum(config: RunConfig, flow: Dataflow) -> str:
    """Describe the levels of the first rows. Raises `ConfigError` where nothing is rewarded, or for a phase without
    rows, `DataError` for a row without a level."""
    chosen, dataset = config.data.curriculum, open_rows(config)
    if "reward" not in flow.stored_columns:
        raise ConfigError(
            f"data.curriculum.by={chosen.by}: algorithm={config.algorithm.name} rewards nothing that it could go by. "
            "Leave it out."
        )
    assert dataset is not None
    assert chosen.by is not None
    num_read = rows_to_read(dataset, config)
    levels = Counter(level_of(dataset.row(index), chosen.by) for index in range(num_read))
    for name, phase in chosen.phases.items():
        if phase.levels and not levels.keys() & set(phase.levels):
            raise ConfigError(
                f"data.curriculum.phases.{name}.levels={phase.levels}: none of {num_read:,} rows is of these levels. "
                f"Known: {', '.join(sorted(levels)[:MOST_SHOWN])}."
            )
    shown = ", ".join(f"{name} ({count:,})" for name, count in sorted(levels.items())[:MOST_SHOWN])
    return f"{len(levels):,} level(s) of {chosen.by} in {num_read:,} rows: {shown}" + (
        ", …" if len(levels) > MOST_SHOWN else ""
    )


def _count_left_out(config: RunConfig, flow: Dataflow) -> str:
    """Describe what a source has beyond what is trained on; empty for nothing. Raises `DataError` where most is held
    out."""
    try:
        dataset, problems = open_rows(config), open_held_out(config)
    except PenstockError:  # the checks of the data and of held-out data report it
        return ""
    if dataset is None:
        return ""
    told = []
    if is_cut(dataset):
        told.append(f"what the source makes beyond {len(dataset):,} rows (data.size says how many)")
    num_read = rows_to_read(dataset, config)
    if held_out := problems.check(dataset, num_read):
        told.append(f"{held_out:,} of {num_read:,} rows, which are problems of evaluation")
    needs = _needs_of(config, flow, flow.rows_are)
    if needs.skips and (lacking := sum(needs.lacks(dataset.row(index)) for index in range(num_read))):
        told.append(f"{lacking:,} of {num_read:,} rows, which have no answer")
    return "; ".join(told)


def _check_environment(config: RunConfig) -> str:
    environment, form = make_environment(config.environment, config.imports), _format_of(config)
    if isinstance(environment, Tools) and form.refusal:
        raise ConfigError(form.refusal)
    limits = config.environment
    return f"{limits.name}: up to {limits.max_turns} turns and {limits.timeout_s:g} s an attempt"


def _format_of(config: RunConfig) -> ConversationFormat:
    told, sees = config.model.chat_template_kwargs, config.rollout.max_pictures > 0
    return make_format(tokenizer_of(config), config.environment.gateway, told, sees=sees)


def _needs_path(stage: Stage) -> bool:
    return stage.kind == "scores" or (stage.kind == "logprobs" and stage.model != "reference")


def _check_other_model(config: RunConfig, stage: Stage) -> str:
    name = str(stage.model)
    if name in config.other_models and name not in config.model.paths:
        return f"{name} by {config.other_models[name].recipe}"
    path = config.model.path_of(name, "")
    return check_other_model(path, f"model.paths.{name}", scores=stage.kind == "scores")


def _check_first_run(start: WarmStartConfig) -> str:
    first = resolve_first(start)
    check_run(first)
    return f"{start.recipe}, {first.config.trainer.max_steps} steps of {first.config.algorithm.name}"


# The way of the weights: the transport, what a publication takes, and whether this machine has room for it.


def describe_weights(config: RunConfig) -> str:
    """The transport, and what it takes. Raises `ResourceError` where this machine has to hold publications and
    cannot."""
    transport = choose_transport(config)
    if transport != "shm":
        return f"{transport}, as asked for: a death is a return to the checkpoint, and ranks keep no copies"
    if config.trainer.lora.publishes_adapter:
        return "shm: adapters alone, through shared memory, and from node to node by their agents"
    told = ["shm: through shared memory, and from node to node by their agents"]
    if (num_elements := elements_of(config)) is None:
        return f"{told[0]}; how much is known once the model is here"
    size = publication_bytes(num_elements, config.rollout.dtype)
    told.append(f"{_size(size)} a publication, {config.num_publications} of them on each node with engines")
    if config.trainer.num_gpus_per_rank and config.rollout.num_gpus_per_worker:
        told += [describe_times(way_of(config, size)), describe_wait(config, way_of(config, size))]
    if not is_elsewhere():
        usage = shutil.disk_usage(SHARED_MEMORY)
        told += check_shared_memory(config, num_elements, SharedMemory(usage.total, usage.free))
    return "; ".join(told)


def way_of(config: RunConfig, num_bytes: int) -> PublicationTimes:
    """The way of a version. A cluster's nodes are taken to have as many cores as a version can use."""
    cores = MOST_THREADS if is_elsewhere() else len(os.sched_getaffinity(0))
    return PublicationTimes(
        num_bytes, config.trainer.num_ranks, config.rollout.tensor_parallel_size,
        threads_per_rank=max(1, int(config.cluster.cpus_per_worker)), threads_per_node=min(cores, MOST_THREADS),
    )  # fmt: skip


def describe_times(way: PublicationTimes) -> str:
    """The seconds that a version takes by each bus, by arithmetic."""
    told = [
        f"{bus}: {way.on_one_node_s(bus):.2g} s a publication, {way.between_nodes_s(bus):.2g} s to other nodes, then a "
        f"pause of {way.paused_s(bus):.2g} s an engine"
        for bus in BUSES
    ]
    return f"by arithmetic, {'; '.join(told)}"


def describe_wait(config: RunConfig, way: PublicationTimes) -> str:
    """The part of it that the next step waits for."""
    if config.max_staleness == 0:
        return "the next step waits for all of it (max_staleness=0)"
    if config.trainer.offload:
        return "the next step waits until ranks have written it: weights are in the host's memory (trainer.offload)"
    return f"the next step waits for copies on the GPUs, {way.taken_s:.2g} s of it, and counts once all is written"


def check_shared_memory(config: RunConfig, num_elements: int, memory: SharedMemory) -> list[str]:
    """Describe what the shared memory of a machine that all of the run is on has no room for, and the promise that
    lapses with it. Raises `ResourceError` if that is the publications."""
    publications = config.num_publications * publication_bytes(num_elements, config.rollout.dtype)
    if memory.total_bytes < publications:
        raise too_small("This machine", memory.total_bytes, publications, config.num_publications)
    if not (config.faults.keep_state and replaces_members(config)) or config.trainer.lora.rank:
        return []
    kept = state_copy_bytes(num_elements)
    left = max(0, memory.free_bytes - publications)
    if kept <= left:
        return []
    return [
        f"the copies that ranks keep of their state ({_size(kept)}, faults.keep_state) do not fit into the "
        f"{_size(left)} beside: the death of a rank is a return to the newest checkpoint, as is that of a "
        f"trainer's node. To have ranks replaced, {how_to_enlarge(publications + kept)}"
    ]


def elements_of(config: RunConfig) -> int | None:
    """Number of elements of the policy's tensors, or all policies'; None for a model that is not here."""
    model = starting_model_config(config)
    first = fresh_shape(model.fresh).num_parameters if model.path is None else stored_elements(model.path)
    paths = [model.paths.get(name) for name in config.trainer.own_models] or [None]
    counts = [first if path is None else stored_elements(path) for path in paths]
    return None if None in counts else sum(filter(None, counts))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"


# The rewards, tried on a row.


def try_rewards(config: RunConfig, flow: Dataflow) -> str:
    """Call each reward on the first row, with an empty response and a short one, in processes as in a run. Returns what
    they gave. Raises `ConfigError` for one that fails for both, or cannot be loaded."""
    dataset = open_rows(config)
    if dataset is None:
        return ""
    row = dataset.row(0)
    task = row.prompt_task()
    found = []
    for name, spec in _reward_functions(config, flow):
        results = asyncio.run(_try_reward(spec, task, config.reward.timeout_s))
        if all(isinstance(result, RewardError) for result in results):
            raise ConfigError(f"{name} fails on {row.where}: {results[-1]}")
        given = ", ".join(
            f"{text!r} {_describe_result(result)}" for text, result in zip(RESPONSES, results, strict=True)
        )
        found.append(f"{name} on {row.where}: {given}")
    return "; ".join(found)


def _reward_functions(config: RunConfig, flow: Dataflow) -> Iterator[tuple[str, RewardSpec]]:
    """The functions by name. What an environment or a judge of the run gives is not tried: neither is there yet."""
    functions = {stage.name: stage.function for stage in flow.of_kind("reward")} or {"": None}  # for evaluation alone
    for stage, function in functions.items():
        name, options = reward_of(flow, stage, config)
        if name != ENVIRONMENT_REWARD and not has_own_judge(name, options):
            spec = RewardSpec.of(function or name, dict(options), tuple(config.imports))
            yield (name if function is None else name_of(function)), spec


async def _try_reward(spec: RewardSpec, task: str, timeout_s: float) -> list[RewardResult]:
    async with RewardPool(spec, timeout_s=timeout_s) as pool:
        return await pool.score([Response(text) for text in RESPONSES], [task] * len(RESPONSES))


def _describe_result(result: RewardResult) -> str:
    if isinstance(result, RewardError):
        return f"fails ({result})"
    return "does not count" if result is None else f"gets {result:g}"
