"""A power cut at any moment costs nothing that counted before: checkpoints, exports, and files of other nodes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Some
from unittest.mock import Mock

import pytest
import torch

from penstock.conf.faults import CheckpointConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.network.connection import new_token
from penstock.network.listener import Listener
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, CheckpointWriter
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.loops.session_policy import SavedStates
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.workers.node.node_transfers import FILES, FileService, FileSet
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.local_files import staged_directory
from penstock.workers.runtime.url_files import SavedFile, saved_file
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.trainer.checkpointing.shard_files import check_files, load
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from tests.amounts import amount
from tests.fakes.actors import FakeHandle
from tests.orchestrator.one_machine import OneMachine
from tests.power_cuts import recorded
from tests.store.driver import make_spec
from tests.store.players import group

SPEC = make_spec()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """This process as the only rank."""
    alone = Ranks.join(TrainerConfig())
    yield alone
    alone.leave()


class Trainer:
    """A rank whose state is the number of its last step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.values = torch.zeros(4)
        self.saver = Saver(self.ranks, timeout_s=60)

    def pieces(self) -> list[Piece]:
        return [Piece("policy/weights", (4,), 0, self.values)]

    def begin_saving(self, directory: str, epoch: int) -> bool:
        return self.saver.begin(self.pieces(), directory, "{}")

    def finish_saving(self) -> list:
        return self.saver.finish()


WORDS = (
    "name=a",
    "model=tiny",
    "model.path=/",
    "data.path=x.jsonl",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=2",
)


def writer_over(directory: RunDirectory, config: RunConfig, trainer: Trainer, store: Store) -> CheckpointWriter:
    prompts = FakeHandle(start_after=PromptStart())
    roles = {"trainer": [("Trainer-0", FakeHandle(trainer))], "prompts": [("Prompts", prompts)]}
    flow = Some(of_kind=lambda kind: [Some(is_scored=False)])
    files = OneMachine(roles.__getitem__)
    places = {"places": files.places, "collect": files.collect, "discard": files.discard, "present": files.present}
    fleet = Some(role=roles.get, flow=flow, model_path="/", resumed=None, owner=Some(epoch=0), **places)
    return CheckpointWriter(RunContext(config, flow, fleet, StoreClient(store), directory, Mock()))


def resumed(place: Path, text: str, config: RunConfig, ranks: Ranks) -> int:
    """Go on from the newest checkpoint. Returns its step, after a look at all that it has; 0: there is none."""
    if not (place / "runs" / "a" / "config.yaml").is_file():
        return 0
    directory = RunDirectory.open(place / "runs" / "a")
    assert directory.config_file.read_text() == text
    checkpoint = Checkpoints(str(directory.checkpoints), config.checkpoint).newest(damaged := [])
    assert not damaged
    if checkpoint is None:
        return 0
    trainer = Trainer(ranks)
    check_files(checkpoint.trainer, checkpoint.files)
    load(trainer.pieces(), checkpoint.trainer, trainer.ranks)
    assert trainer.values.tolist() == [float(checkpoint.step)] * 4
    assert Store(SPEC, restore=checkpoint.store).ledger.residents.next_group == checkpoint.step
    steps = [line["step"] for line in directory.read_metrics() if line["step"] <= checkpoint.step]
    assert steps == list(range(1, checkpoint.step + 1))
    return checkpoint.step


def test_a_run_resumes_from_its_last_checkpoint_whenever_the_power_is_cut(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "disk").mkdir()
    config, trainer = load_config([*WORDS, f"output_dir={tmp_path}/disk/runs"]), Trainer(ranks)

    async def body(directory: RunDirectory) -> None:
        store = Store(SPEC)
        client = StoreClient(store)
        writer = writer_over(directory, config, trainer, store)
        for step in (1, 2, 3, 3):  # the run goes back behind its third, and writes that anew
            if step > store.ledger.residents.next_group:
                await client.put_groups([group(step)])
                directory.log_metrics({"step": step})
            trainer.values.fill_(step)
            disk.promise(min(step - 1, disk.promised))
            await writer.begin(step, {})
            await writer.finish(strict=True)
            disk.promise(step)
        await store.close("test over")

    with recorded(tmp_path / "disk", num_mixtures=amount(10)) as disk:
        directory = RunDirectory.create(config)
        asyncio.run(body(directory))
        text = directory.config_file.read_text()
        directory.close()
    assert disk.num_moments > 100
    for promised, place in disk.after_power_cuts():
        assert resumed(place, text, config, ranks) >= promised


def test_what_others_have_written_is_on_the_disk_before_a_checkpoint_counts(tmp_path: Path) -> None:
    """Ranks on other machines, say, or the store of an earlier version."""
    (tmp_path / "disk").mkdir()
    with recorded(tmp_path / "disk") as disk:
        checkpoints = Checkpoints(f"{tmp_path}/disk/checkpoints", CheckpointConfig())
        rank = Path(checkpoints.directory(1), "trainer", "rank_1.bin")
        rank.parent.mkdir(parents=True)
        rank.write_bytes(b"weights")
        checkpoints.seal(Checkpoint(checkpoints.directory(1), 1, PromptStart(), "/", {}, [saved_file(rank)]))
        disk.promise(True)
    for promised, place in disk.after_power_cuts():
        checkpoint = Checkpoints(f"{place}/checkpoints", CheckpointConfig()).newest()
        assert checkpoint is not None or not promised
        if checkpoint is not None:
            check_files(checkpoint.trainer, checkpoint.files)


def test_a_sessions_saved_state_is_whole_or_not_there(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "disk").mkdir()
    members = [("Trainer-0", FakeHandle(Trainer(ranks)))]
    files = OneMachine(lambda role: members)
    places = {"places": files.places, "collect": files.collect, "discard": files.discard}
    fleet = Some(role=lambda role: members, owner=Some(epoch=0), **places)
    with recorded(tmp_path / "disk") as disk:
        asyncio.run(SavedStates(fleet, f"{tmp_path}/disk/runs/a/states", 60.0).save("first", {}))  # type: ignore[arg-type]
        disk.promise(True)
    for promised, place in disk.after_power_cuts():
        state = place / "runs" / "a" / "states" / "first"
        if promised or (state / "state.json").exists():
            saved = json.loads((state / "state.json").read_text())
            check_files(f"{state}/trainer", [SavedFile(**file) for file in saved["files"]])


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize("before", [(), ("config.json",)])
def test_an_exported_model_is_whole_or_not_there(tmp_path: Path, before: tuple[str, ...]) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "adapter/adapter.safetensors": b"adapter"}
    target = tmp_path / "disk" / "runs" / "model"
    (tmp_path / "disk").mkdir()
    for name in before:
        target.mkdir(parents=True)
        (target / name).write_bytes(b"older")
    with recorded(tmp_path / "disk") as disk:
        with staged_directory(target) as part:
            for name, content in files.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_bytes(content)
        disk.promise(True)
    for promised, place in disk.after_power_cuts():
        found = contents(place / "runs" / "model")
        found = {name: content for name, content in found.items() if not name.startswith(".new.part")}
        assert found == files if promised else all(found[name] in (b"older", files[name]) for name in found)


def test_what_comes_from_another_node_is_whole_or_not_there(tmp_path: Path) -> None:
    source, token = tmp_path / "source", new_token()
    (source / "sub").mkdir(parents=True)
    (source / "rank_1.bin").write_bytes(b"weights")
    (source / "sub" / "more.bin").write_bytes(b"more")
    (tmp_path / "disk").mkdir()
    there, here = FileService(tmp_path / "there", token), FileService(tmp_path / "here", token)
    files = FileSet.of_directory(source)
    there.offer(files, source)
    listener = Listener("127.0.0.1", token, {FILES: there.serve})
    with recorded(tmp_path / "disk") as disk:
        here.collect(files, tmp_path / "disk" / "trainer", listener.address)
        disk.promise(True)
    listener.close()
    for promised, place in disk.after_power_cuts():
        found = {name: content for name, content in contents(place).items() if not name.endswith(".part")}
        whole = {f"trainer/{name}": content for name, content in contents(source).items()}
        assert found == whole if promised else found.items() <= whole.items()
