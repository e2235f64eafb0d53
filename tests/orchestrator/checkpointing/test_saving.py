"""A checkpoint that cannot be written, or not in time, costs that checkpoint only."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace as Some
from unittest.mock import Mock

import pytest

from penstock.conf.algorithms import GrpoConfig
from penstock.conf.data import EvaluationConfig
from penstock.conf.errors import CheckpointError, DeadlineExceeded
from penstock.conf.faults import CheckpointConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.checkpointing import checkpoints
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, CheckpointWriter
from penstock.orchestrator.control import process
from penstock.orchestrator.run_context import RunContext
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.url_files import SavedFile
from tests.fakes.actors import FakeHandle
from tests.orchestrator.one_machine import OneMachine, empty_snapshot
from tests.tmpfs import run_in_tmpfs


class LateTrainer:
    """A trainer whose first checkpoint misses its deadline, and which begins no other before `free`. Then a file of the
    first comes late. `calls`: in order."""

    def __init__(self, calls):
        self.calls, self.free, self.directory = calls, True, None

    def begin_saving(self, directory, epoch):
        self.calls.append("trainer")
        self.directory = Path(directory) if self.free else self.directory
        return self.free

    def finish_saving(self):
        if self.directory.parent.name == "global_step_1":
            self.free = False
            raise DeadlineExceeded("too late")
        return []

    def end_late(self):
        self.directory.mkdir(parents=True)
        (self.directory / "rank_0.bin").write_text("late")
        self.free = True


class EmptyStore:
    def __init__(self, calls):
        self.calls = calls

    async def cut(self):
        self.calls.append("store")
        return [0]

    async def snapshot(self, root, step, keep, timeout_s):
        return empty_snapshot(root, step)


def saving(tmp_path, resumed=None, evaluation=None, **config):
    """A writer, its trainer, what it tells the run's directory, and the order of calls."""
    calls = []
    trainer, directory = FakeHandle(LateTrainer(calls)), Mock(metrics_file=tmp_path / "metrics.jsonl")
    prompts = FakeHandle(start_after=PromptStart())
    roles = {"trainer": [("Trainer-0", trainer)], "prompts": [("Prompts", prompts)]}
    flow = Some(of_kind=lambda kind: [Some(is_scored=False)])
    checkpoint = CheckpointConfig(directory=str(tmp_path), **config)
    held_out = evaluation or EvaluationConfig()
    run = RunConfig(
        algorithm=GrpoConfig(), checkpoint=checkpoint, trainer=TrainerConfig(max_steps=4), evaluation=held_out
    )
    files = OneMachine(roles.__getitem__)
    places = {"places": files.places, "collect": files.collect, "discard": files.discard, "present": files.present}
    fleet = Some(role=roles.get, flow=flow, model_path="/", resumed=resumed, owner=Some(epoch=0), **places)
    writer = CheckpointWriter(RunContext(run, flow, fleet, EmptyStore(calls), directory, Mock()))
    return writer, trainer, directory, calls


def test_checkpoints_are_skipped_while_one_is_late_and_what_it_left_is_removed(tmp_path):
    writer, trainer, directory, calls = saving(tmp_path)

    async def save(step):
        await writer.begin(step, {})
        await writer.finish()
        return writer.failed, sorted(path.name for path in tmp_path.iterdir())

    async def run():
        assert await save(1) == (1, [])
        calls.clear()
        assert await save(2) == (2, [])
        assert calls == ["trainer"]  # nothing of the store is held for one that does not begin
        trainer.actor.end_late()
        assert await save(3) == (2, ["global_step_3"])

    asyncio.run(run())
    kinds = [call.args[0] for call in directory.event.call_args_list]
    assert kinds == ["checkpoint_failed", "checkpoint_failed", "checkpoint"]
    assert "an earlier checkpoint has missed its deadline" in directory.event.call_args_list[1].kwargs["message"]


def test_a_missing_file_of_a_rank_costs_this_checkpoint_only(tmp_path):
    writer, trainer, directory, _ = saving(tmp_path)
    lost = [SavedFile.of_bytes("rank_0.bin", b"weights")]

    async def run():
        trainer.answers["finish_saving"] = lost
        await writer.begin(1, {})
        await writer.finish()
        trainer.answers["finish_saving"] = []
        await writer.begin(2, {})
        await writer.finish(strict=True)

    asyncio.run(run())
    assert writer.failed == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2"]
    message = directory.event.call_args_list[0].kwargs["message"]
    assert "global_step_1/trainer/rank_0.bin is missing as this machine sees it" in message
    assert "that all nodes share" in message


def test_a_checkpoint_that_the_next_one_waits_for_is_there_once_it_is_written(tmp_path):
    writer, trainer, _, _ = saving(tmp_path)
    may_end = asyncio.Event()

    async def wait():
        await may_end.wait()
        return []

    async def run():
        trainer.answers["finish_saving"] = wait
        await writer.begin(2, {})
        beginning = asyncio.create_task(writer.begin(4, {}))
        await asyncio.sleep(0)
        asked = asyncio.create_task(writer.has(2))
        await asyncio.sleep(0)
        may_end.set()
        assert await asked
        await beginning
        await writer.finish(strict=True)

    asyncio.run(run())


def test_a_score_that_comes_late_decides_which_checkpoint_stays(tmp_path):
    """Evaluation beside training: two steps are saved before the score of the first is known."""
    every_step = EvaluationConfig(every_steps=1)
    writer, _, directory, _ = saving(tmp_path, evaluation=every_step, keep_best=1, keep_last=1, every_steps=50)

    def there():
        return sorted(path.name[-1] for path in tmp_path.iterdir())

    async def save(step):
        assert writer.is_due(step)
        await writer.begin(step, {})
        await writer.finish()

    async def run():
        for step in (2, 3, 4):
            await save(step)
        assert there() == ["2", "3", "4"], "one whose score is awaited was removed"
        writer.scored(3, {"accuracy/heldout": 0.5})
        await writer.finish()
        assert there() == ["2", "3", "4"]
        writer.scored(2, {})  # lost
        await writer.finish()
        assert there() == ["3", "4"]
        writer.scored(4, {"accuracy/heldout": 0.4})
        await writer.begin(5, {})
        writer.scored(5, {"accuracy/heldout": 0.6})  # before it is complete
        await writer.finish()
        assert there() == ["5"]

    asyncio.run(run())
    events = [(call.args[0], call.kwargs) for call in directory.event.call_args_list]
    assert [fields["steps"] for kind, fields in events if kind == "checkpoints_removed"] == [[2]]
    assert [fields["best"] for kind, fields in events if kind == "checkpoint_scored"] == [3, 3, 5]


def test_a_score_that_cannot_be_written_is_kept_for_the_next_try(tmp_path):
    every_step = EvaluationConfig(every_steps=1)
    writer, _, directory, _ = saving(tmp_path, evaluation=every_step, keep_best=1, keep_last=1)

    async def run():
        await writer.begin(2, {})
        await writer.finish()
        (tmp_path / "global_step_2" / "scores.json").mkdir()
        writer.scored(2, {"accuracy/heldout": 0.9})
        await writer.finish(strict=True)
        kind, error, advice = directory.failed_writes.record_failure.call_args.args
        assert (kind, type(error)) == ("scores", CheckpointError)
        assert advice == "The next score or checkpoint tries it again."
        (tmp_path / "global_step_2" / "scores.json").rmdir()
        await writer.begin(3, {})
        await writer.finish(strict=True)

    asyncio.run(run())
    assert Checkpoints(str(tmp_path), CheckpointConfig()).scores() == {2: 0.9}


def test_the_next_command_knows_the_scores_of_those_before(tmp_path):
    words = {"evaluation": EvaluationConfig(every_steps=1), "keep_best": 1, "keep_last": 1}

    async def run(step, accuracy):
        writer, *_ = saving(tmp_path, **words)
        await writer.begin(step, {})
        await writer.finish()
        writer.scored(step, {"accuracy/heldout": accuracy})
        await writer.finish()

    for step, accuracy in ((2, 0.9), (3, 0.1), (4, 0.5)):
        asyncio.run(run(step, accuracy))
    assert Checkpoints(str(tmp_path), CheckpointConfig()).steps() == [2, 4]


@pytest.mark.parametrize(("keep_best", "steps"), [(0, [3, 4]), (1, [2, 3, 4])])
def test_evaluated_steps_are_saved_where_the_best_are_kept(tmp_path, keep_best, steps):
    words = {"keep_best": keep_best, "every_steps": 3}
    writer, *_ = saving(tmp_path, evaluation=EvaluationConfig(every_steps=2), **words)
    assert [step for step in range(1, 5) if writer.is_due(step)] == steps


def sealed(tmp_path, step):
    """The checkpoint of a command before: when it was sealed."""
    directory = tmp_path / f"global_step_{step}"
    (directory / "trainer").mkdir(parents=True)
    (directory / "trainer" / "rank_0.bin").write_text("whole")
    (directory / "COMPLETE").write_text(f"{step}\n")
    return directory


@pytest.mark.parametrize("way", ["resumed", "taken over"])
def test_a_sealed_checkpoint_is_not_written_again_by_a_run_that_goes_on_from_it(tmp_path, way):
    directory = sealed(tmp_path, 2)
    resumed = Some(step=2, directory=str(directory)) if way == "resumed" else None
    writer, _, _, calls = saving(tmp_path, resumed=resumed)
    if way == "taken over":
        asyncio.run(writer.adopt(2, {}))
    assert not writer.is_due(2, is_last=True)
    assert writer.is_due(3, is_last=True)
    assert calls == []


def test_a_checkpoint_of_another_run_is_not_taken_for_this_ones(tmp_path):
    resumed = Some(step=2, directory=str(sealed(tmp_path / "another", 2)))
    assert saving(tmp_path, resumed=resumed)[0].is_due(2, is_last=True)


def test_a_sealed_checkpoint_counts_no_longer_once_it_is_written_anew(tmp_path):
    """Were the command to die here, its marker would stand for files that are half of one and half of another."""
    directory = sealed(tmp_path, 2)
    writer, trainer, _, _ = saving(tmp_path)

    def begun(place, epoch):
        assert not directory.exists()
        return True

    trainer.answers["begin_saving"] = begun
    trainer.answers["finish_saving"] = []

    async def run():
        await writer.begin(2, {})
        assert not (directory / "COMPLETE").exists()
        await writer.finish(strict=True)

    asyncio.run(run())
    assert (directory / "COMPLETE").is_file()
    assert not (directory / "trainer" / "rank_0.bin").exists()


@pytest.mark.parametrize(("step", "is_last"), [(4, False), (2, True)])
def test_the_last_one_waits_for_a_late_one(tmp_path, step, is_last):
    writer, trainer, _, _ = saving(tmp_path)

    async def run():
        await writer.begin(1, {})
        await writer.finish()
        asyncio.get_running_loop().call_later(0.01, trainer.actor.end_late)
        await writer.begin(step, {}, is_last=is_last)
        await writer.finish(strict=True)

    asyncio.run(run())
    assert (tmp_path / f"global_step_{step}" / "COMPLETE").is_file()


def test_the_last_one_fails_where_a_late_one_does_not_end(tmp_path):
    writer, *_ = saving(tmp_path, timeout_s=0.1)

    async def run():
        await writer.begin(1, {})
        await writer.finish()
        await writer.begin(4, {})
        await writer.finish(strict=True)

    with pytest.raises(CheckpointError, match=r"global_step_4: not begun.*checkpoint\.timeout_s=0\.1"):
        asyncio.run(run())


SMALL_TMPFS = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace as Some
from unittest.mock import Mock

import torch

from penstock.conf.algorithms import GrpoConfig
from penstock.conf.data import EvaluationConfig
from penstock.conf.faults import CheckpointConfig
from penstock.conf.errors import CheckpointError
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, CheckpointWriter
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.control import process
from penstock.workers.prompts.source import PromptStart
from penstock.workers.trainer.checkpointing.shard_files import check_files
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.weights.piece import Piece
from penstock.workers.trainer.ranks import Ranks
from tests.fakes.actors import FakeHandle
from tests.orchestrator.one_machine import OneMachine, empty_snapshot

place = Path(sys.argv[1])
ELEMENTS = 3 * 2**18  # 3 MiB
saver = Saver(Ranks.join(TrainerConfig()), timeout_s=60)


class Store:
    async def cut(self):
        return [0]

    async def snapshot(self, root, step, keep, timeout_s):
        place = empty_snapshot(root, step)
        (Path(place) / "rows").write_bytes(bytes(1000))
        return place


trainer = FakeHandle(
    begin_saving=lambda place, _: saver.begin([Piece("w", (ELEMENTS,), 0, torch.ones(ELEMENTS))], place),
    finish_saving=saver.finish,
)
prompts = FakeHandle(start_after=PromptStart())
roles = {"trainer": [("Trainer-0", trainer)], "prompts": [("Prompts", prompts)]}
flow = Some(of_kind=lambda kind: [Some(is_scored=False)])
config = RunConfig(algorithm=GrpoConfig(), checkpoint=CheckpointConfig(directory=str(place), keep_last=1))
directory, progress = Mock(metrics_file=place / "metrics.jsonl"), Mock()
files = OneMachine(roles.__getitem__)
places = {"places": files.places, "collect": files.collect, "discard": files.discard, "present": files.present}
fleet = Some(role=roles.get, flow=flow, model_path="/", resumed=None, owner=Some(epoch=0), **places)
writer = CheckpointWriter(RunContext(config, flow, fleet, Store(), directory, progress))
checkpoints = Checkpoints(str(place), config.checkpoint)


async def save(step):
    await writer.begin(step, {})
    await writer.finish()
    newest = checkpoints.newest()
    check_files(newest.trainer, newest.files)
    assert [path.name for path in place.glob("global_step_*")] == [f"global_step_{newest.step}"]
    return newest.step


async def main():
    assert [await save(step) for step in (1, 2)] == [1, 2]
    (place / "ballast").write_bytes(bytes(int(3.5 * 2**20)))
    assert [await save(step) for step in (3, 4)] == [2, 2]
    assert writer.failed == 2
    (place / "ballast").unlink()
    assert await save(5) == 5
    (place / "ballast").write_bytes(bytes(int(3.5 * 2**20)))
    await writer.begin(6, {})
    try:
        await writer.finish(strict=True)
    except CheckpointError as error:
        print(str(error).splitlines()[0])


asyncio.run(main())
print([call.args[0] for call in directory.event.call_args_list])
"""


@pytest.mark.real
def test_a_full_disk_costs_the_attempt_only(tmp_path: Path, warm_python: list[str]) -> None:
    output = run_in_tmpfs(SMALL_TMPFS, tmp_path, "test_resume.py has a place that cannot be written", warm_python)
    message, events = output.splitlines()[-2:]
    failed = ["checkpoint_failed"]
    assert events == str(["checkpoint", "checkpoint", *failed, *failed, "checkpoint", *failed])
    assert message.startswith(f"{tmp_path}/global_step_6/trainer: rank 0 could not write: ")
    assert "Its part alone needs 3,145,728 bytes, and " in message
    assert message.endswith("or set checkpoint.directory to a place with more.")


def test_a_thread_that_outlives_its_run_completes_nothing_and_no_other_begins(tmp_path, monkeypatch):
    """The place hangs while the last checkpoint is completed, and the run returns meanwhile."""
    hangs, answers, write = threading.Event(), threading.Event(), checkpoints.write_text

    def late(place, text):
        hangs.set()
        assert answers.wait(60)
        write(place, text)

    async def returns():
        writer, *_ = saving(tmp_path)
        await writer.begin(2, {})
        while not hangs.is_set():
            await asyncio.sleep(0.01)
        await writer.give_up()

    async def goes_on():
        writer, _, directory, _ = saving(tmp_path)
        await writer.begin(2, {})
        await writer.finish()
        assert writer.failed == 1
        assert "before the run returned has not ended" in directory.event.call_args.kwargs["message"]
        answers.set()
        while Checkpoints(str(tmp_path), CheckpointConfig()).is_used_by_another:
            await asyncio.sleep(0.01)
        assert not list(tmp_path.glob("*/COMPLETE"))
        monkeypatch.setattr(checkpoints, "write_text", write)
        await writer.begin(2, {})
        await writer.finish(strict=True)

    monkeypatch.setattr(checkpoints, "write_text", late)
    monkeypatch.setattr(process, "LEAVE_S", 0.0)
    process.run(returns())
    process.run(goes_on())
    assert [path.parent.name for path in tmp_path.glob("*/COMPLETE")] == ["global_step_2"]
