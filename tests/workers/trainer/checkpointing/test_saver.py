"""A rank's share of a checkpoint: exact, written while training goes on, and refused where it does not fit."""

import contextlib
import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import CheckpointError
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import LoraConfig, PolicyConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.trainer.checkpointing.shard_files import INDEX, load
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.piece import Piece
from tests.amounts import amount
from tests.workers.trainer.conftest import put_together

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]


def everything(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {piece.name: piece.values.clone() for piece in trainer.engine.state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def trained(make_trainer: Make, make_rows: MakeRows) -> PolicyTrainer:
    trainer = make_trainer(lr=1e-3)
    for seed in range(2):
        trainer.update(make_rows(8, seed=seed), ppo_clip_loss)
    return trainer


def test_a_resumed_trainer_goes_on_bit_for_bit(
    trained: PolicyTrainer, make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path / "saved"))
    state.finish()
    trained.update(make_rows(8, seed=2), ppo_clip_loss)
    other = make_trainer(lr=1e-3)
    TrainingState({"policy": other}).load(str(tmp_path / "saved"))
    assert other.num_updates == 2
    other.update(make_rows(8, seed=2), ppo_clip_loss)
    assert same(everything(other), everything(trained))


def test_each_of_several_policies_goes_on_from_its_own_counters(
    make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    """Also where they are named in another order; others are refused."""
    lora = LoraConfig(rank=4)

    def of(*policies: str, **options: Any) -> PolicyTrainer:
        named = {name: PolicyConfig(optimizer={"lr": 1e-3 if name == "a" else 1e-2}) for name in policies}
        return make_trainer(lora=lora, policies=named, schedule="cosine", max_steps=9, **options)

    trained, other, strange = of("a", "b"), of("b", "a"), of("a", "c")
    for policy, seeds in (("a", (0, 1)), ("b", (2, 3, 4))):
        with trained.using(policy):
            for seed in seeds:
                trained.update(make_rows(8, seed=seed), ppo_clip_loss)
    state = TrainingState({"policy": trained})
    names = [piece.name for piece in state.pieces()]
    assert [name for name in names if "counters" in name] == ["policy/counters/a", "policy/counters/b"]
    state.begin(str(tmp_path / "saved"))
    state.finish()
    TrainingState({"policy": other}).load(str(tmp_path / "saved"))
    for policy in ("b", "a"):
        for trainer in (trained, other):
            with trainer.using(policy):
                assert trainer.num_updates == trainer.engine.num_optimizer_steps() == (2 if policy == "a" else 3)
                trainer.update(make_rows(8, seed=9), ppo_clip_loss)
    assert same(everything(other), everything(trained))
    with pytest.raises(CheckpointError, match=r"has no 'policy/weights/.*\.c\.weight"):
        TrainingState({"policy": strange}).load(str(tmp_path / "saved"))


def test_the_only_policy_has_counters_of_its_trainer(trained: PolicyTrainer) -> None:
    names = [piece.name for piece in TrainingState({"policy": trained}).pieces()]
    assert names[-2:] == ["policy/counters", "rng/0"]
    assert len(names) == 3 * len(list(trained.model.parameters())) + 2


def test_a_checkpoint_is_of_the_moment_at_which_it_was_begun(
    trained: PolicyTrainer, make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    before = everything(trained)
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path))
    trained.update(make_rows(8, seed=2), ppo_clip_loss)  # at once: its optimizer step waits for the copy
    state.finish()
    other = make_trainer()
    TrainingState({"policy": other}).load(str(tmp_path))
    assert same(everything(other), before)


def test_a_second_checkpoint_uses_the_first_ones_copies(trained: PolicyTrainer, tmp_path: Path) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path / "1"))
    state.finish()
    first = state.saver.copy.memory.data_ptr()
    state.begin(str(tmp_path / "2"))
    state.finish()
    assert state.saver.copy.memory.data_ptr() == first
    assert len(state.saver.copy.memory) == state.save_bytes


def test_a_trainer_leaves_its_device_only_once_a_save_has_copied_it(
    trained: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, calls = TrainingState({"policy": trained}), []
    assert trained.before_weights_change[-1] == state.saver.wait_until_copied
    monkeypatch.setattr(trained, "before_weights_change", [lambda: calls.append("copied")])
    monkeypatch.setattr(trained.engine, "leave_device", lambda kept: calls.append("left"))
    monkeypatch.setattr(trained.ranks, "device", torch.device("meta"))  # a CPU is not left
    trained.leave_device()
    assert calls == ["copied", "left"]


def test_files_are_listed_with_size_and_checksum(trained: PolicyTrainer, tmp_path: Path) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path))
    files = {file.name: file for file in state.finish()}
    assert files.keys() == {"rank_0.bin", "index.json", "carried.json"} == {path.name for path in tmp_path.iterdir()}
    num_bytes = sum(piece.values.nbytes for piece in state.pieces())
    assert files["rank_0.bin"].num_bytes == (tmp_path / "rank_0.bin").stat().st_size == num_bytes
    assert state.finish() == []


def test_it_can_be_kept_behind_a_url(trained: PolicyTrainer, make_trainer: Make, tmp_path: Path) -> None:
    state = TrainingState({"policy": trained})
    state.begin(f"file://{tmp_path}/bucket/run")
    state.finish()
    other = make_trainer()
    TrainingState({"policy": other}).load(f"file://{tmp_path}/bucket/run")
    assert same(everything(other), everything(trained))


def test_what_draws_random_numbers_goes_on_from_where_it_was(
    trained: PolicyTrainer, make_trainer: Make, tmp_path: Path
) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path))
    state.finish()
    expected = torch.rand(3)
    TrainingState({"policy": make_trainer()}).load(str(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_another_architecture_is_refused_by_name_and_changes_nothing(
    trained: PolicyTrainer, make_trainer: Make, tmp_path: Path
) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path / "saved"))
    state.finish()
    wider = FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=48, num_heads=2, num_kv_heads=1)
    build_fresh_model(tmp_path / "wider", wider, seed=3)
    other = make_trainer(str(tmp_path / "wider"))
    before = everything(other)
    with pytest.raises(CheckpointError, match=r"is of shape .*, and this model's is of .* another architecture"):
        TrainingState({"policy": other}).load(str(tmp_path / "saved"))
    assert same(everything(other), before)
    with pytest.raises(CheckpointError, match="has no 'critic/"):
        TrainingState({"critic": make_trainer()}).load(str(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["rank_0.bin", "index.json"])
def test_a_truncated_file_is_one_error(trained: PolicyTrainer, make_trainer: Make, tmp_path: Path, name: str) -> None:
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path))
    state.finish()
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        TrainingState({"policy": make_trainer()}).load(str(tmp_path))


class Touch:
    """An object that runs code if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_nothing_in_a_checkpoint_is_run_when_it_is_read(
    trained: PolicyTrainer, make_trainer: Make, tmp_path: Path
) -> None:
    place, touched = tmp_path / "saved", tmp_path / "touched"
    state = TrainingState({"policy": trained})
    state.begin(str(place))
    names = [file.name for file in state.finish()]
    whole = {name: (place / name).read_bytes() for name in names}
    for name in [*names, ".metadata", "carried.pickle"]:
        (place / name).write_bytes(pickle.dumps(Touch(touched)))
        trainer = make_trainer()
        with contextlib.suppress(CheckpointError):
            TrainingState({"policy": trainer}, preparation=Preparation((), {}, list)).load(str(place))
        assert not touched.exists()
        if name in whole:
            (place / name).write_bytes(whole[name])


INDEX_FAULTS = {
    "a file elsewhere": (lambda entry: entry["boxes"][0].update(file="../other"), "no name of a file"),
    "a box outside": (lambda entry: entry["boxes"][0].update(corner=[1, 0]), r"of shape \[2, 4\] has a box at"),
    "a box too small": (lambda entry: entry["boxes"][0].update(extents=[1, 1]), "7 of them in files"),
    "boxes that overlap": (lambda entry: entry["boxes"][1].update(corner=[0, 0]), "overlap"),
    "a dim too few": (lambda entry: entry["boxes"][0].update(corner=[0]), "ValueError"),
    "a negative place": (lambda entry: entry["boxes"][0].update(offset=-8), "has a box at"),
    "a place between elements": (lambda entry: entry["boxes"][0].update(corner=[0.5, 0]), "has a box at"),
    "a strange dtype": (lambda entry: entry.update(dtype="qint8"), "is of 'qint8'"),
    "a missing key": (lambda entry: entry.pop("shape"), "KeyError"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_that_no_rank_writes_is_refused(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    saver = Saver(ranks, timeout_s=60)
    saver.begin([Piece("w", (2, 4), 0, torch.ones(2, 1)), Piece("w", (2, 4), 1, torch.ones(2, 3))], str(tmp_path))
    saver.finish()
    index = json.loads((tmp_path / INDEX).read_text())
    change, message = INDEX_FAULTS[fault]
    change(index["tensors"]["w"])
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load([Piece("w", (2, 4), 0, torch.zeros(8))], str(tmp_path), ranks)


def test_a_range_across_others_is_read_from_each(ranks: Ranks, tmp_path: Path) -> None:
    values = torch.arange(10).to(torch.bfloat16)
    saver = Saver(ranks, timeout_s=60)
    saver.begin([Piece("w", (2, 5), first, values[first : first + 5]) for first in (0, 5)], str(tmp_path))
    saver.finish()
    piece = Piece("w", (2, 5), 3, torch.zeros(4))
    load([piece], str(tmp_path), ranks)
    assert piece.values.tolist() == [3, 4, 5, 6]


@settings(max_examples=amount(30), deadline=None)
@given(st.data())
def test_what_was_cut_in_one_way_is_read_in_any_other(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Shards and columns of FSDP2's kind, runs of ZeRO's kind."""
    directory, ranks = str(tmp_path_factory.mktemp("cut")), Ranks(0, 1, torch.device("cpu"), False, timedelta(0))
    shape = data.draw(st.sampled_from([(6,), (4, 6), (3, 2, 4)]))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    saver = Saver(ranks, timeout_s=60)
    saver.begin(cut(whole, data), directory)
    saver.finish()
    wanted = cut(torch.zeros(shape), data)
    load(wanted, directory, ranks)
    assert torch.equal(put_together(wanted)["w"], whole)


def cut(whole: torch.Tensor, data: Any) -> list[Piece]:
    """All of a tensor, in runs or in boxes."""
    shape, count = tuple(whole.shape), whole.numel()
    if data.draw(st.booleans()):
        ends = sorted({*data.draw(st.lists(st.integers(1, count), max_size=3)), count})
        return [
            Piece("w", shape, first, whole.reshape(-1)[first:end].clone())
            for first, end in zip([0, *ends], ends, strict=False)
        ]
    parts = [(0, whole)]
    for dim in range(min(2, len(shape))):
        size, step = data.draw(st.integers(1, shape[dim])), math.prod(shape[dim + 1 :])
        parts = [
            (first + step * size * number, part)
            for first, some in parts
            for number, part in enumerate(some.split(size, dim))
        ]
    return [Piece("w", shape, first, values.clone(memory_format=torch.contiguous_format)) for first, values in parts]


FIRST_FORMAT = {
    "format": 1,
    "tensors": {
        "w": {
            "size": 8,
            "dtype": "float32",
            "ranges": [
                {"first": 0, "length": 2, "file": "rank_0.bin", "offset": 0},
                {"first": 4, "length": 2, "file": "rank_0.bin", "offset": 8},
                {"first": 2, "length": 2, "file": "rank_1.bin", "offset": 0},
                {"first": 6, "length": 2, "file": "rank_1.bin", "offset": 8},
            ],
        },
        "run": {
            "size": 6,
            "dtype": "int64",
            "ranges": [
                {"first": 4, "length": 2, "file": "rank_0.bin", "offset": 16},
                {"first": 0, "length": 4, "file": "rank_1.bin", "offset": 16},
            ],
        },
    },
}
"""An index of the first format: `w`, [2, 4], of two ranks that split its columns, and `run`, [2, 3], in two runs."""


def test_a_checkpoint_of_the_first_format_is_read(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(FIRST_FORMAT))
    for rank, (some, run) in enumerate((([0, 1, 4, 5], [4, 5]), ([2, 3, 6, 7], [0, 1, 2, 3]))):
        bytes_ = torch.tensor(some, dtype=torch.float32).numpy().tobytes() + torch.tensor(run).numpy().tobytes()
        (tmp_path / f"rank_{rank}.bin").write_bytes(bytes_)
    wanted = [Piece("w", (2, 4), 1, torch.zeros(2, 2)), Piece("run", (2, 3), 0, torch.zeros(2, 3, dtype=torch.int64))]
    load(wanted, str(tmp_path), ranks)
    assert [piece.values.tolist() for piece in wanted] == [[[1, 2], [5, 6]], [[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize("change", [{"length": -1}, {"first": 7}, {"length": 1}, {"first": 1}])
def test_a_damaged_index_of_the_first_format_is_refused(ranks: Ranks, tmp_path: Path, change: dict[str, int]) -> None:
    index = copy.deepcopy(FIRST_FORMAT)
    index["tensors"]["w"]["ranges"][0].update(change)  # type: ignore[index]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        load([Piece("w", (2, 4), 0, torch.zeros(2, 4))], str(tmp_path), ranks)


def test_an_index_of_a_later_format_is_refused_by_its_number(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"format": 3, "tensors": {}}')
    with pytest.raises(CheckpointError, match="its format is 3; this Penstock reads 2 and 1"):
        load([Piece("w", (2, 4), 0, torch.zeros(2, 4))], str(tmp_path), ranks)


class FarPlace(LocalFileSystem):
    """A file system behind a URL that keeps of some files something else than what it is given."""

    protocol = "far"
    faults: ClassVar[dict[str, Callable[[bytes], bytes | None]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("far://")))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        data = Path(lpath).read_bytes()
        kept = self.faults.get(Path(rpath).name, lambda data: data)(data)
        if kept is not None:
            Path(rpath).write_bytes(kept)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("far", FarPlace, clobber=True)
    yield f"far://{tmp_path}/bucket"
    FarPlace.faults.clear()


FAULTS: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "is lost": (lambda data: None, "is missing"),
    "is cut short": (lambda data: data[:-1], r"has [0-9,]+ bytes instead of [0-9,]+"),
    "has a flipped bit": (lambda data: bytes([data[0] ^ 1]) + data[1:], "is damaged: its checksum is"),
}


@pytest.mark.parametrize("name", ["rank_0.bin", "index.json", "carried.json"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_what_was_written_fails_the_save_by_its_name(
    trained: PolicyTrainer, far: str, name: str, fault: str
) -> None:
    state = TrainingState({"policy": trained})
    FarPlace.faults[name], message = FAULTS[fault]
    state.begin(far)
    with pytest.raises(CheckpointError, match=rf"{far}: rank 0 could not write: {name}, read back .* {message}"):
        state.finish()
    FarPlace.faults.clear()
    state.begin(f"{far}/again")
    assert len(state.finish()) == 3


def test_a_local_file_is_read_back_too(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "rank_0.bin").symlink_to("carried.json")  # which is written later
    saver = Saver(ranks, timeout_s=60)
    saver.begin([Piece("w", (8,), 0, torch.ones(8))], str(tmp_path))
    with pytest.raises(CheckpointError, match=r"rank_0\.bin, read back from there, has 0 bytes instead of 32"):
        saver.finish()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_behind_a_url_that_was_damaged_since_is_refused_by_its_name(
    trained: PolicyTrainer, make_trainer: Make, far: str, tmp_path: Path, fault: str
) -> None:
    state = TrainingState({"policy": trained})
    state.begin(far)
    files = state.finish()
    change, message = FAULTS[fault]
    file = tmp_path / "bucket" / "rank_0.bin"
    damaged = change(file.read_bytes())
    file.unlink() if damaged is None else file.write_bytes(damaged)
    other = make_trainer()
    before = everything(other)
    with pytest.raises(CheckpointError, match=rf"{far}/rank_0\.bin {message}.* Resume from the checkpoint before it"):
        TrainingState({"policy": other}).load(far, files)
    assert same(everything(other), before)


def test_a_place_that_cannot_be_written_is_told_by_finish(trained: PolicyTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = TrainingState({"policy": trained})
    state.begin(str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="rank 0 could not write"):
        state.finish()
    state.begin(str(tmp_path / "elsewhere"))
    assert state.finish()
