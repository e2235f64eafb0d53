"""The loop over actors that are played: what it does in which order, and which failure it tells."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock.algorithms.catalogue import build_dataflow
from penstock.conf.errors import CheckpointError, DataError, PartnerGone, PenstockError, WeightError, WorkerDied
from penstock.orchestrator import signals
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints
from penstock.orchestrator.cluster.node_agents import StateNodes
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control import controller as controller_module
from penstock.orchestrator.control.controller import Controller, TrainingResult
from penstock.orchestrator.observability.marks import Mark, marks_of
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import JsonLines
from penstock.orchestrator.observability.state_log import StateLog
from penstock.orchestrator.recovery.takeover import TakeoverPoint
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.signals import Interrupt
from penstock.workers.prompts.source import PromptStart
from penstock.workers.protocols import Publication
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from tests.fakes.actors import Call, FakeHandle, never
from tests.orchestrator.one_machine import OneMachine, empty_snapshot
from tests.orchestrator.one_node import on_one_node


class Store:
    """Of the controller: there is always a batch."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.versions: list[int] = []

    async def served(self, version: int, epoch: int, max_active: int | None) -> None:
        self.versions.append(version)

    async def close(self, reason: str) -> None:
        self.closed.set()

    async def stats(self) -> dict[str, float]:
        return {}

    async def describe(self) -> dict[str, Any]:
        return {"leases": []}

    async def work(self) -> dict[str, Any]:
        return {"now": 0.0, "leases": [], "admitted": [], "missed": 0}

    async def settle(self, stage: str, epoch: int) -> int:
        return 0

    async def cut(self) -> int:
        return 0

    async def snapshot(self, root: str, step: int, keep: int, timeout_s: float) -> str:
        return empty_snapshot(root, step)


def report(step: int, *more: Any) -> StepReport:
    one = np.ones(1)
    rows = TrainedRows(
        one, one.astype(np.int64), one.astype(np.int64), one < 0, np.zeros(1, np.int64), np.zeros(1), one > 0
    )
    return StepReport(step, step - 1, {}, rows, 0.0, 0.0, {}, np.arange(1))


class Play:
    """A run of played actors. `methods`: of a role's actors, by role."""

    def __init__(self, tmp_path: Path, *words: str, **methods: dict[str, Callable[..., Any]]) -> None:
        self.words = ["model=tiny", "data.path=x.jsonl", f"output_dir={tmp_path}", "name=played", *words]
        self.config = load_config(["tracking.samples_every_steps=0", *self.words])
        self.methods = methods
        self.calls: list[Call] = []
        self.accuracies: list[tuple[int, float]] = []
        """Version and what was measured."""
        self.resumed: Any = None
        """The checkpoint that it starts from."""
        self.taken: TakeoverPoint | None = None
        self.directory = RunDirectory.create(self.config)

    def run(self, accuracy: Callable[[int], float] | None = None) -> TrainingResult:
        return asyncio.run(asyncio.wait_for(self._run(accuracy), 60))

    async def _run(self, accuracy: Callable[[int], float] | None) -> TrainingResult:
        store: Any = Store()
        flow = build_dataflow(self.config.algorithm)
        serve = {"run": lambda _: store.closed.wait(), "stats": lambda: {"busy_s": 0.0}}
        actors: dict[str, dict[str, Callable[..., Any]]] = {
            "trainer": {
                "step": report, "begin_saving": lambda place, epoch: True, "finish_saving": list, "stats": dict,
                "finish_publishing": lambda version, epoch: Publication(str(self.directory.path), version),
                "export": lambda place: {},
            },
            "rollout": serve,
            "reward": serve,
            "compute": serve,
            "prompts": serve | {"start_after": lambda admitted: PromptStart()},
        }  # fmt: skip

        def role_of(role: str) -> list[tuple[str, FakeHandle]]:
            if role not in actors:
                return []
            methods = actors[role] | self.methods.get(role, {})
            return [(role.title(), FakeHandle(None, role.title(), self.calls, **methods))]

        files = OneMachine(role_of)
        fleet: Any = SimpleNamespace(
            role=role_of,
            store=None, resumed=self.resumed, flow=flow, model_path="/", weights_root=self.directory.path,
            places=files.places, collect=files.collect, discard=files.discard, config=self.config, owner=Owner(),
            teams=files.teams, present=files.present, actors=files.actors, remove=files.remove, kill=files.kill,
            handle_of=files.handle_of, is_lent=files.is_lent, num_loans=files.num_loans, lent=list,
            roll_call=files.roll_call,
            relay_nodes=on_one_node(), state_nodes=StateNodes({}, {}, {}), stacks_root="", watched=[],
            capacity=SimpleNamespace(nodes=[]), plan=[], machines=[], trials={},
        )  # fmt: skip

        async def measure(fleet: Any) -> dict[str, float]:
            version = max((call.arguments[0].version for call in self.calls if call.method == "load"), default=0)
            for _ in range(100):  # long enough for another load, if one is under way
                await asyncio.sleep(0)
            assert accuracy is not None
            self.accuracies.append((version, accuracy(version)))
            return {"accuracy/heldout": self.accuracies[-1][1]}

        evaluator: Any = SimpleNamespace(measure=measure) if accuracy is not None else None
        progress = ProgressDisplay(self.config, "played", console=Console(quiet=True))
        context = RunContext(self.config, flow, fleet, store, self.directory, progress)
        return await Controller(context, [JsonLines(self.directory)], evaluator, taken=self.taken).run()

    def steps(self) -> list[int]:
        return [call.arguments[0] for call in self.calls if call.method == "step"]


@pytest.mark.parametrize(("max_staleness", "every"), [(0, 1), (0, 2), (0, 50), (2, 0)])
def test_a_run_that_stops_early_exports_and_saves_the_model_that_was_measured(
    tmp_path: Path, max_staleness: int, every: int
) -> None:
    words = [f"max_staleness={max_staleness}", "evaluation.every_steps=3", "evaluation.stop_at_accuracy=0.9"]
    play = Play(tmp_path, *words, f"checkpoint.every_steps={every}", "trainer.max_steps=20")
    outcome = play.run(lambda version: 0.95 if version >= 6 else 0.1)
    assert play.accuracies[-1] == (6, 0.95)
    assert outcome.num_steps == 6
    assert play.steps() == [1, 2, 3, 4, 5, 6], "another update was made of the model that was measured"
    saved = Checkpoints(str(play.directory.checkpoints), play.config.checkpoint).steps()
    assert saved[-1:] == ([6] if every else [])
    methods = [call.method for call in play.calls]
    assert "step" not in methods[methods.index("export") :]
    assert [line["step"] for line in play.directory.read_metrics()] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("every", [1, 50])
def test_a_run_that_trained_on_exports_the_checkpoint_that_reached_the_goal(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = list[tuple[str, Path]]()
    monkeypatch.setattr(
        controller_module, "replace_model", lambda place, directory: exported.append((place, directory))
    )
    words = ["max_staleness=2", "evaluation.every_steps=3", "evaluation.stop_at_accuracy=0.9", "checkpoint.keep_last=1"]
    play = Play(tmp_path, *words, f"checkpoint.every_steps={every}", "trainer.max_steps=20")
    outcome = play.run(lambda version: 0.95 if version >= 6 else 0.1)
    assert (6, 0.95) in play.accuracies
    assert 6 < outcome.num_steps < 20
    steps = Checkpoints(str(play.directory.checkpoints), play.config.checkpoint).steps()
    assert steps == [6, outcome.num_steps]
    assert exported == [(str(play.directory.checkpoints / "global_step_6"), play.directory.model)]
    assert "export" not in [call.method for call in play.calls]
    (event,) = [event for event in play.directory.read_events() if event["kind"] == "stopped_early"]
    assert (event["step"], event["accuracy"]) == (6, 0.95)


@pytest.mark.parametrize(("is_late", "reached"), [(False, 9), (True, 6)])
def test_a_goal_whose_checkpoint_cannot_be_written_fails_no_run(
    tmp_path: Path, is_late: bool, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on to the next evaluation; where the goal was counted before that, the last model is written."""
    exported, places = list[str](), list[str]()
    monkeypatch.setattr(controller_module, "replace_model", lambda place, directory: exported.append(place))

    def events(kind: str) -> list[int]:
        return [event["step"] for event in play.directory.read_events() if event["kind"] == kind]

    def begin(place: str, epoch: int) -> bool:
        places.append(place)
        if "global_step_6" in place and not is_late:
            raise CheckpointError("No space left on device")
        return True

    async def finish() -> list[Any]:
        while "global_step_6" in places[-1]:
            await asyncio.sleep(0)
            if events("stopped_early"):
                raise CheckpointError("No space left on device")
        return []

    words = ["max_staleness=2", "evaluation.every_steps=3", "evaluation.stop_at_accuracy=0.9", "checkpoint.keep_last=1"]
    saving: dict[str, Callable[..., Any]] = {"begin_saving": begin, "finish_saving": finish}
    play = Play(tmp_path, *words, "checkpoint.every_steps=50", "trainer.max_steps=20", trainer=saving)
    outcome = play.run(lambda version: 0.95 if version >= 6 else 0.1)
    assert (events("checkpoint_failed"), events("stopped_early")) == ([6], [reached])
    assert reached < outcome.num_steps < 20
    assert exported == ([] if is_late else [str(play.directory.checkpoints / "global_step_9")])
    assert [call.method for call in play.calls].count("export") == is_late


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_run_that_continues_knows_that_it_has_reached_its_goal(
    tmp_path: Path, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A goal whose checkpoint could not be written did not end the run before, either."""
    exported = list[str]()
    monkeypatch.setattr(controller_module, "replace_model", lambda place, directory: exported.append(place))
    words = ["max_staleness=2", "evaluation.every_steps=3", "evaluation.stop_at_accuracy=0.9", "checkpoint.keep_last=1"]
    play = Play(tmp_path, *words, "checkpoint.every_steps=50", "trainer.max_steps=10")
    play.directory.log_metrics({"step": 6, "evaluation/step": 6, "accuracy/heldout": 0.95})
    place = play.directory.checkpoints / "global_step_6"
    if is_saved:
        place.mkdir(parents=True)
        (place / "COMPLETE").write_text("6")
    play.resumed = SimpleNamespace(step=8, directory="elsewhere", store=None)
    outcome = play.run(lambda version: 0.1)
    assert (outcome.num_steps, play.steps()) == ((8, []) if is_saved else (10, [9, 10]))
    assert exported == ([str(place)] if is_saved else [])


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_each_evaluated_step_is_saved_and_the_best_stay(tmp_path: Path, max_staleness: int) -> None:
    words = [f"max_staleness={max_staleness}", "evaluation.every_steps=2", "checkpoint.keep_best=2"]
    play = Play(tmp_path, *words, "checkpoint.every_steps=50", "checkpoint.keep_last=1", "trainer.max_steps=9")
    play.run(lambda version: {0: 0.9, 2: 0.3, 4: 0.8, 6: 0.5, 8: 0.1}.get(version, 0.2))
    checkpoints = Checkpoints(str(play.directory.checkpoints), play.config.checkpoint)
    assert checkpoints.steps() == [4, 6, 9]
    assert checkpoints.scores() == {4: 0.8, 6: 0.5, 9: 0.2}
    events = play.directory.read_events()
    assert {event["step"] for event in events if event["kind"] == "checkpoint"} == {2, 4, 6, 8, 9}
    scored = [event for event in events if event["kind"] == "checkpoint_scored"]
    assert [(event["step"], event["score"], event["best"]) for event in scored] == [
        (2, 0.3, 2), (4, 0.8, 4), (6, 0.5, 4), (8, 0.1, 4), (9, 0.2, 4)
    ]  # fmt: skip
    assert Mark(4, "best checkpoint: accuracy/heldout 0.8", "good") in marks_of(events)


def test_a_checkpoint_that_a_takeover_begins_has_the_score_that_was_reported(tmp_path: Path) -> None:
    words = ["max_staleness=2", "evaluation.every_steps=3", "checkpoint.keep_best=1", "checkpoint.keep_last=1"]
    play = Play(tmp_path, *words, "checkpoint.every_steps=3", "trainer.max_steps=10", "faults.store_snapshot_s=0")
    line = {"step": 6, "evaluation/step": 6, "accuracy/heldout": 0.9}
    play.directory.log_metrics(line)
    play.taken = TakeoverPoint(6, {}, line)
    play.resumed = SimpleNamespace(step=6, directory="elsewhere", store=None)
    play.run(lambda version: 0.1)
    checkpoints = Checkpoints(str(play.directory.checkpoints), play.config.checkpoint)
    assert (checkpoints.steps(), checkpoints.scores()) == ([6, 10], {6: 0.9, 10: 0.1})


@pytest.fixture
def way_out() -> Iterator[None]:
    """That of the command line at SIGTERM."""
    before = signal.signal(signal.SIGTERM, Interrupt())
    yield
    signal.signal(signal.SIGTERM, before)


def told_to_end_at(step: int, *then: Callable[[], Any]) -> Callable[..., Any]:
    """A trainer's step during which SIGTERM comes. `then`: what it does afterwards."""

    async def made(number: int, *arguments: Any) -> Any:
        if number == step:
            signal.raise_signal(signal.SIGTERM)
            for each in then:
                await each()
        return report(number)

    return made


@pytest.mark.usefixtures("way_out")
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_sigterm_has_the_step_end_and_a_checkpoint_taken(tmp_path: Path, max_staleness: int) -> None:
    words = ["checkpoint.every_steps=50", "faults.preemption_s=60", f"max_staleness={max_staleness}"]
    play = Play(tmp_path, *words, "trainer.max_steps=20", trainer={"step": told_to_end_at(3)})
    with pytest.raises(KeyboardInterrupt):
        play.run()
    assert play.steps() == [1, 2, 3]
    assert Checkpoints(str(play.directory.checkpoints), play.config.checkpoint).steps() == [3]
    events = [(event["kind"], event["step"]) for event in play.directory.read_events()]
    assert events[-2:] == [("checkpoint", 3), ("preempted", 3)]
    assert "export" not in [call.method for call in play.calls]
    assert [line["step"] for line in play.directory.read_metrics()] == [1, 2, 3]


async def again() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("way_out")
def test_sigterm_that_arrives_several_times_at_once_is_one(tmp_path: Path) -> None:
    """`timeout` sends it to the command, then to the command's process group."""
    words = ["checkpoint.every_steps=50", "faults.preemption_s=3600", "trainer.max_steps=20"]
    play = Play(tmp_path, *words, trainer={"step": told_to_end_at(2, again)})
    with pytest.raises(KeyboardInterrupt):
        play.run()
    assert Checkpoints(str(play.directory.checkpoints), play.config.checkpoint).steps() == [2]


async def forever() -> None:
    await asyncio.sleep(3600)


@pytest.mark.usefixtures("way_out")
@pytest.mark.parametrize(
    ("word", "then"),
    [
        ("faults.preemption_s=0.05", [forever]),
        ("faults.preemption_s=3600", [again, forever]),
        ("faults.preemption_s=0", [forever]),
    ],
    ids=["the time is over", "a second one", "there is no time"],
)
def test_without_time_sigterm_is_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, then: list[Callable[[], Any]]
) -> None:
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    play = Play(tmp_path, word, "trainer.max_steps=20", trainer={"step": told_to_end_at(2, *then)})
    with pytest.raises(KeyboardInterrupt):
        play.run()
    assert play.steps() == [1, 2]
    assert not play.directory.checkpoints.exists()
    assert isinstance(signal.getsignal(signal.SIGTERM), Interrupt)


@pytest.mark.usefixtures("way_out")
def test_sigterm_during_the_last_step_ends_nothing_sooner(tmp_path: Path) -> None:
    words = ["faults.preemption_s=3600", "trainer.max_steps=2"]
    play = Play(tmp_path, *words, trainer={"step": told_to_end_at(2)})
    assert play.run().num_steps == 2
    assert "export" in [call.method for call in play.calls]


def test_without_checkpoints_none_is_taken_where_a_run_stops_early(tmp_path: Path) -> None:
    words = ["max_staleness=1", "evaluation.every_steps=1", "evaluation.stop_at_accuracy=0.5"]
    play = Play(tmp_path, *words, "checkpoint.every_steps=0", "trainer.max_steps=5")
    assert play.run(lambda version: 1.0).num_steps == 1
    assert not play.directory.checkpoints.exists()


def test_training_goes_on_while_engines_load_where_no_goal_is_set(tmp_path: Path) -> None:
    """The price of `stop_at_accuracy` is paid by those who set it."""
    play = Play(tmp_path, "max_staleness=2", "evaluation.every_steps=1", "trainer.max_steps=4")
    begun: list[int] = []

    def accuracy(version: int) -> float:
        begun.append(len(play.steps()) - version)
        return 0.5

    play.run(accuracy)
    assert max(begun) >= 1


def raising(error: Exception, after: int) -> Callable[..., Any]:
    async def call(*_: Any) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        raise error

    return call


@pytest.mark.parametrize("cause", [DataError("row 3"), WorkerDied("Rollout has died")])
def test_the_cause_is_told_though_its_consequence_was_there_first(tmp_path: Path, cause: PenstockError) -> None:
    lost = PartnerGone("step 1: another rank is gone")
    actors: Any = {"trainer": {"step": raising(lost, 1)}, "rollout": {"run": raising(cause, 50)}}
    play = Play(tmp_path, "faults.max_restarts=0", **actors)
    with pytest.raises(type(cause)) as raised:
        play.run()
    assert type(raised.value) is type(cause)
    assert str(raised.value).splitlines() == [str(cause), "What failed with it:", f"  PartnerGone: {lost}"]


@pytest.mark.parametrize("saves", [True, False])
def test_an_export_that_fails_is_told_after_the_last_checkpoint_was_tried(tmp_path: Path, saves: bool) -> None:
    """It can be made of the checkpoint, and not the other way round."""
    words = ["checkpoint.every_steps=50", "trainer.max_steps=2"]
    export = raising(WeightError("export: 3,000 bytes are needed"), 1)
    saving = {} if saves else {"finish_saving": raising(CheckpointError("no room for it"), 3)}
    play = Play(tmp_path, *words, trainer={"export": export, **saving})
    with pytest.raises(WeightError if saves else CheckpointError) as raised:
        play.run()
    others = [] if saves else ["What failed with it:", "  WeightError: export: 3,000 bytes are needed"]
    assert str(raised.value).splitlines()[1:] == others
    methods = [call.method for call in play.calls]
    assert methods.index("finish_saving") < methods.index("export")
    assert Checkpoints(str(play.directory.checkpoints), play.config.checkpoint).steps() == ([2] if saves else [])
    assert [line["step"] for line in play.directory.read_metrics()] == [1, 2]


def test_a_place_of_checkpoints_that_does_not_answer_costs_those(tmp_path: Path) -> None:
    words = ["checkpoint.every_steps=1", "trainer.max_steps=3", "tracking.export_model=false"]
    play = Play(tmp_path, *words)
    place = play.directory.checkpoints

    def step(number: int, *more: Any) -> StepReport:
        if number == 1:
            place.symlink_to(place)
        if number == 3:
            place.unlink()
        return report(number)

    play.methods = {"trainer": {"step": step}}
    assert play.run().num_steps == 3
    failed = [event["message"] for event in play.directory.read_events() if event["kind"] == "checkpoint_failed"]
    assert [message.partition(":")[0] for message in failed] == [f"{place}/global_step_{step}" for step in (1, 2)]
    assert all("cannot be written" in message for message in failed)
    assert Checkpoints(str(place), play.config.checkpoint).steps() == [3]


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_member_that_hangs_when_all_is_trained_does_not_hold_up_the_end(role: str, tmp_path: Path) -> None:
    """Its process ends with the fleet. Nobody may wait for its answer: heartbeats have ended, too."""
    members: Any = {role: {"run": never}}
    play = Play(tmp_path, "trainer.max_steps=2", "cluster.shutdown_timeout_s=0.2", **members)
    assert play.run().num_steps == 2
    [event] = [event for event in play.directory.read_events() if event["kind"] == "not_ended"]
    assert event["members"] == [role.title()]


def test_a_look_at_the_run_that_fails_is_told_and_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: StateLog) -> dict[str, Any]:
        raise ValueError("no such thing")

    monkeypatch.setattr(StateLog, "_state", broken)
    play = Play(tmp_path, "trainer.max_steps=3", "evaluation.every_steps=0")
    assert play.run().num_steps == 3
    [event] = [event for event in play.directory.read_events() if event["kind"] == "observing_failed"]
    assert (event["error"], event["message"]) == ("ValueError", "no such thing")
    assert "in broken" in event["traceback"]
