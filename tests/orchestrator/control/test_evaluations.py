"""Evaluations beside training: each measures its own version, whoever dies meanwhile, and training goes on. On a
virtual clock: the real controller, loans, supervisor and store over scripted actors."""

import asyncio
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import ConfigError, WorkerDied
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control import evaluations as evaluations_module
from penstock.orchestrator.control.evaluations import Evaluations, steps_lost
from penstock.orchestrator.recovery.resume import open_run
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.protocols import Publication
from tests.amounts import amount
from tests.orchestrator.control.test_loans import kill
from tests.orchestrator.scripted_fleet import (
    GROUPS,
    NUM_STEPS,
    SIZE,
    ScriptedFleet,
    controller_over,
    flow_of,
    long_config,
    store_of,
)
from tests.run_files import metrics_of
from tests.store.invariants import check_invariants
from tests.virtual_time import run_virtually

EVERY = 7
DUE = [7, 14, 21, 28]


class Measured:
    """An evaluator whose work takes a number of seconds of one engine. Its accuracy says which version it has asked."""

    def __init__(self, engine_s: float) -> None:
        self._engine_s = engine_s
        self.asked: list[list[str]] = []
        """Engines of each try."""

    async def measure(self, fleet: Any) -> dict[str, float]:
        for _ in range(100):
            try:
                engines = await fleet.present("rollout")
            except WorkerDied:
                continue
            self.asked.append([name for name, _ in engines])
            await asyncio.sleep(self._engine_s / len(engines))
            if any(handle.is_dead for _, handle in engines):
                continue
            (version,) = {await handle.actor.engine.version() for _, handle in engines}
            return {"accuracy/heldout": version / 100}
        raise WorkerDied("again and again")


def config_of(tmp_path: Path, *words: str) -> Any:
    own = ["max_staleness=2", "rollout.num_workers=4", f"evaluation.every_steps={EVERY}"]
    return long_config(tmp_path, *own, *words)


class Deadly(Measured):
    """An evaluator whose engines die the first time that they measure a version after a step."""

    def __init__(self, engine_s: float) -> None:
        super().__init__(engine_s)
        self.killed: list[str] = []

    async def measure(self, fleet: Any) -> dict[str, float]:
        if self.asked and not self.killed:
            asyncio.get_running_loop().call_later(self._engine_s / 2, self._kill, await fleet.present("rollout"))
        return await super().measure(fleet)

    def _kill(self, engines: Any) -> None:
        for name, handle in engines:
            self.killed.append(name)
            handle.kill()


def run(config: Any, evaluator: Measured, seed: int = 0, *, kills: bool = False, keeps: bool = True) -> ScriptedFleet:
    async def main() -> ScriptedFleet:
        random = Random(seed)
        fleet = ScriptedFleet(store_of(config, flow_of(config)), config, flow_of(config), random)
        if not keeps:
            fleet.relay_nodes.agents["node"][1].answers["keep_version"] = False
        directory = RunDirectory.create(config)
        killing = asyncio.ensure_future(kill(fleet, random)) if kills else None
        await asyncio.wait_for(controller_over(fleet, config, directory, evaluator=evaluator).run(), 1e6)
        if killing is not None:
            killing.cancel()
        assert kills or config.evaluation.num_workers or not fleet.lent()
        directory.close()
        check_invariants(fleet.store.ledger)
        return fleet

    return run_virtually(main())


def accuracies(tmp_path: Path) -> dict[int, float]:
    """Accuracy by the step of its line."""
    lines = [line for line in metrics_of(tmp_path / "run") if "accuracy/heldout" in line]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["accuracy/heldout"] for line in lines}


def test_some_engines_measure_a_version_while_the_rest_samples_for_later_steps(tmp_path: Path) -> None:
    evaluator = Measured(engine_s=12.0)
    run(config_of(tmp_path), evaluator)
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *DUE, NUM_STEPS]}
    assert [len(engines) for engines in evaluator.asked[1:-1]] == [1] * len(DUE)
    order = [line["step"] for line in metrics_of(tmp_path / "run") if line.get("evaluation/step") == line["step"]]
    assert order == [0, *DUE, NUM_STEPS]
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    for due in DUE:
        late = len(steps) - steps[::-1].index(due) - 1
        assert due + 1 in steps[:late]  # training has gone on
    lines = RunDirectory.open(tmp_path / "run").read_metrics()
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert all("reward/mean" in line for line in lines[1:])
    assert lines[-1]["evaluation/lost"] == 0


def test_as_many_engines_are_lent_as_are_done_before_the_next_evaluation(tmp_path: Path) -> None:
    run(config_of(tmp_path), evaluator := Measured(engine_s=250.0))
    assert {len(engines) for engines in evaluator.asked[2:-1]} <= {2, 3}  # by how long the one after step 7 took
    run(config_of(tmp_path / "one", "evaluation.share=1"), evaluator := Measured(engine_s=250.0))
    assert {len(engines) for engines in evaluator.asked[1:-1]} == {1}


def test_an_engine_alone_measures_and_samples_and_the_next_version_waits(tmp_path: Path) -> None:
    run(config_of(tmp_path, "rollout.num_workers=1"), Measured(engine_s=30.0))
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *DUE, NUM_STEPS]}


def test_without_staleness_the_next_step_comes_after_the_evaluation(tmp_path: Path) -> None:
    run(config_of(tmp_path, "max_staleness=0"), Measured(engine_s=30.0))
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert [line["step"] for line in lines if "accuracy/heldout" in line] == [0, *DUE, NUM_STEPS]
    assert not any(name.startswith("evaluation/") for line in lines for name in line)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_engines_of_evaluations_alone_measure_beside_training(max_staleness: int, tmp_path: Path) -> None:
    words = [f"max_staleness={max_staleness}", "rollout.num_workers=2", "evaluation.num_workers=2"]
    fleet = run(config_of(tmp_path, *words), evaluator := Measured(engine_s=20.0))
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *DUE, NUM_STEPS]}
    assert evaluator.asked == [
        ["Rollout-0", "Rollout-1"], *[["Rollout-2", "Rollout-3"]] * len(DUE), ["Rollout-0", "Rollout-1"]
    ]  # fmt: skip
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    for due in DUE:
        assert due + 1 in steps[: len(steps) - steps[::-1].index(due) - 1]  # training has gone on
    assert [name for name, _ in fleet.lent()] == ["Rollout-2", "Rollout-3"]
    assert all(handle.actor.worker.stats()["samples"] == 0 for _, handle in fleet.lent())


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["evaluation.every_steps=0"], "Set evaluation.every_steps"),
        (["rollout.num_workers=auto"], "Set rollout.num_workers to a number"),
        (["evaluation.stop_at_accuracy=0.9", "checkpoint.every_steps=0"], "Set checkpoint.every_steps"),
        (["placement=colocated", "trainer.num_ranks=2"], "placement=disaggregated"),
    ],
)
def test_engines_of_evaluations_alone_are_refused_where_they_cannot_be(words: list[str], advice: str) -> None:
    base = ["model=tiny", "data.path=x.jsonl", "rollout.engine=hf", "rollout.num_workers=2", "evaluation.every_steps=1"]
    with pytest.raises(ConfigError, match=rf"^evaluation\.num_workers=1: .*{advice}"):
        load_config([*base, "evaluation.num_workers=1", *words])


@pytest.mark.parametrize(("num_engines", "num_own"), [(1, 0), (4, 0), (2, 2)])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(10)))
def test_whoever_dies_no_other_version_is_measured_and_each_row_trained_once(
    num_engines: int, num_own: int, seed: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"rollout.num_workers={num_engines}", f"evaluation.num_workers={num_own}")
    numbers = run_virtually(run(config, Measured(engine_s=40.0), seed, kills=True).store.stats())
    assert numbers["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
    assert not any(value for name, value in numbers.items() if name.startswith("dropped/"))
    found = accuracies(tmp_path)
    assert all(accuracy == step / 100 for step, accuracy in found.items())
    lost = [event["step"] for event in RunDirectory.open(tmp_path / "run").read_events()
            if event["kind"] == "evaluation_lost"]  # fmt: skip
    assert not lost
    assert sorted(found) == [0, *DUE, NUM_STEPS]
    lines = metrics_of(tmp_path / "run")
    assert max(line.get("staleness/max", 0) for line in lines) <= config.max_staleness
    assert max(line.get("evaluation/lost", 0) for line in lines) == len(lost)


@pytest.mark.parametrize(("num_own", "max_staleness"), [(0, 2), (1, 2), (1, 0)])
def test_another_engine_loads_the_version_again_of_one_that_dies_meanwhile(
    num_own: int, max_staleness: int, tmp_path: Path
) -> None:
    words = [f"evaluation.num_workers={num_own}", f"max_staleness={max_staleness}", "rollout.num_workers=3"]
    fleet = run(config_of(tmp_path, *words), evaluator := Deadly(engine_s=60.0))
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *DUE, NUM_STEPS]}
    (lost,) = evaluator.killed
    first, second = evaluator.asked[1:3]
    assert first == [lost]
    assert (second == first) == bool(num_own)  # evaluations' own is replaced by one that is lent as well
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    assert 10 in steps[: len(steps) - steps[::-1].index(7) - 1]  # version 7's file was to be written again by then
    assert all(handle.actor.worker.stats()["samples"] == 0 for _, handle in fleet.lent())
    assert len(fleet.lent()) == num_own
    assert fleet.memory.kept is None
    assert max(line.get("staleness/max", 0) for line in metrics_of(tmp_path / "run")) <= max_staleness


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_version_that_no_node_keeps_is_made_again_of_its_checkpoint_or_lost(
    is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[str, int]]()

    def publish(place: str, root: str, version: int) -> Publication:
        made.append((place, version))
        return Publication(f"{root}/v", version)

    monkeypatch.setattr(evaluations_module, "publish_checkpoint", publish)
    words = ["rollout.num_workers=2", *(["checkpoint.every_steps=30", "checkpoint.keep_best=1"] if is_saved else [])]
    run(config_of(tmp_path, *words), Deadly(engine_s=60.0), keeps=False)
    assert made == ([(f"{tmp_path}/run/checkpoints/global_step_7", 7)] if is_saved else [])
    due = [7] if is_saved else []
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *due, *DUE[1:], NUM_STEPS]}
    assert metrics_of(tmp_path / "run")[-1]["evaluation/lost"] == int(not is_saved)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_run_that_resumes_measures_of_a_checkpoint_beside_its_next_steps(
    num_engines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations_module, "publish_checkpoint", lambda _, root, step: Publication(f"{root}/v", step))
    words = [f"rollout.num_workers={num_engines}", "checkpoint.every_steps=5", "checkpoint.keep_best=1"]
    config = config_of(tmp_path, *words, *(["evaluation.num_workers=1"] if num_engines == 1 else []))

    async def live(evaluator: Measured, until: int) -> None:
        directory, resumed = open_run(config)
        assert resumed is None or isinstance(resumed, Checkpoint)
        flow = flow_of(config)
        store = store_of(config, flow, resumed.store if resumed is not None else None)
        fleet = ScriptedFleet(store, config, flow, Random(3), resumed)
        running = asyncio.ensure_future(controller_over(fleet, config, directory, evaluator=evaluator).run())
        while not running.done() and not (directory.checkpoints / f"global_step_{until}" / "COMPLETE").exists():
            await asyncio.sleep(1.0)
        everybody = asyncio.all_tasks() - {asyncio.current_task()}
        for task in everybody:
            task.cancel()
        await asyncio.gather(*everybody, return_exceptions=True)
        directory.close()

    run_virtually(live(Measured(engine_s=1e4), until=10))
    assert 7 not in accuracies(tmp_path)
    run_virtually(live(Measured(engine_s=10.0), until=99))
    assert accuracies(tmp_path) == {step: step / 100 for step in [0, *DUE, NUM_STEPS]}
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    assert 11 in steps[: steps.index(7, steps.index(10))]  # beside the next steps


def test_what_was_lost_of_steps_that_a_return_undoes_is_lost_no_longer() -> None:
    lost = [{"kind": "evaluation_lost", "step": step} for step in (7, 14)]
    assert steps_lost(lost) == {7, 14}
    for kind in ("returned", "resume"):
        assert steps_lost([*lost, {"kind": kind, "step": 10}]) == {7}
        assert steps_lost([*lost, {"kind": kind, "step": 10}, lost[1]]) == {7, 14}


def test_a_run_that_is_preempted_waits_for_no_evaluation(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.num_workers=1")
    fleet = SimpleNamespace(role=lambda role: [("Rollout-0", None)], lent=list)
    progress = SimpleNamespace(note=lambda text: None)
    context: Any = SimpleNamespace(config=config, fleet=fleet, directory=None, flow=flow_of(config), progress=progress)
    evaluator: Any = SimpleNamespace(measure=lambda fleet: asyncio.sleep(1e9))

    async def none(engines: Any) -> list[Any]:
        return []

    loans: Any = SimpleNamespace(catch_up=none)
    unused: Any = None
    told = list[bool]()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        evaluations = Evaluations(context, evaluator, loans, unused, unused, lambda *_: None, lambda: bool(told))
        async with asyncio.TaskGroup() as tasks:
            evaluations.start(tasks)
            await evaluations.begin(7)
            loop.call_later(5.0, told.append, True)
            began = loop.time()
            await evaluations.before_load()
            return loop.time() - began

    assert 5.0 <= run_virtually(main()) <= 7.0


def test_a_share_is_a_number_of_engines_or_auto() -> None:
    for wrong in ("0", "all"):
        with pytest.raises(ConfigError, match=r"evaluation\.share"):
            load_config(["model=tiny", "data.path=x.jsonl", f"evaluation.share={wrong}"])
