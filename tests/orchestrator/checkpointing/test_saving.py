"""A disk that fills up while a checkpoint is written costs that checkpoint only."""

from pathlib import Path

from tests.tmpfs import run_in_tmpfs

SMALL_TMPFS = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace as Some
from unittest.mock import Mock

import torch

from penstock.conf.algorithm import GrpoConfig
from penstock.conf.checkpoint import CheckpointConfig
from penstock.conf.errors import CheckpointError
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints
from penstock.orchestrator.checkpointing.saving import CheckpointWriter
from penstock.workers.prompts.source import PromptStart
from penstock.workers.trainer.checkpointing.saver import Saver, check_files
from penstock.workers.trainer.engines.engine import Piece
from penstock.workers.trainer.process_group import ProcessGroup

place = Path(sys.argv[1])
ELEMENTS = 3 * 2**18  # 3 MiB
saver = Saver(ProcessGroup.join(0, 1, None, 60, False), timeout_s=60)


class Remote:
    def __init__(self, call):
        self.call = call

    async def remote(self, *arguments):
        return self.call(*arguments)


class Store:
    async def cut(self):
        return [0]

    async def snapshot(self, root, step, keep):
        Path(root).mkdir(parents=True)
        (Path(root) / "rows").write_bytes(bytes(1000))


trainer = Some(
    begin_saving=Remote(lambda directory: saver.begin([Piece("w", (ELEMENTS,), 0, torch.ones(ELEMENTS))], directory)),
    finish_saving=Remote(saver.finish),
)
prompts = Some(start_after=Remote(lambda admitted: PromptStart()))
roles = {"trainer": [("Trainer-0", trainer)], "prompts": [("Prompts", prompts)]}
flow = Some(of_kind=lambda kind: [Some(is_scored=False)])
config = RunConfig(algorithm=GrpoConfig(), checkpoint=CheckpointConfig(directory=str(place), keep_last=1))
directory, progress = Mock(), Mock()
writer = CheckpointWriter(Some(role=roles.get, flow=flow, model_path="/"), Store(), config, directory, progress)
checkpoints = Checkpoints(str(place), config.checkpoint)


async def save(step):
    await writer.begin(step)
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
    await writer.begin(6)
    try:
        await writer.finish(strict=True)
    except CheckpointError as error:
        print(str(error).splitlines()[0])


asyncio.run(main())
print([call.args[0] for call in directory.event.call_args_list])
"""


def test_a_full_disk_costs_the_attempt_only(tmp_path: Path) -> None:
    output = run_in_tmpfs(SMALL_TMPFS, tmp_path, "test_resume.py has a place that cannot be written")
    message, events = output.splitlines()[-2:]
    failed = ["checkpoint_failed"]
    assert events == str(["checkpoint", "checkpoint", *failed, *failed, "checkpoint", *failed])
    assert message.startswith(f"{tmp_path}/global_step_6/trainer: rank 0 could not write: ")
    assert "Its part alone needs 3,145,728 bytes, and " in message
    assert message.endswith("or set checkpoint.directory to a place with more.")
