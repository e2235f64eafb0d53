"""A rank that goes on from an in-memory checkpoint makes the very update that the dead one would have made. Here one
rank, in one process; of two, one of which is killed: `several_ranks/test_ranks_killed.py`."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import ppo_clip_loss, value_loss
from penstock.conf.errors import MemoryCheckpointError, PartnerGone
from penstock.conf.trainer import LoraConfig, OptimizerConfig, PolicyConfig, TrainerConfig
from penstock.workers.trainer import memory_checkpoint
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.memory_slots import SLOTS, copied_steps
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.scalar import CriticTrainer
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.publication import publication as publications
from penstock.workers.weights.publication.publication import DeviceCopies
from tests.workers.trainer.conftest import ENGINES, assert_same, random_rows

Make = Callable[..., PolicyTrainer]
NET_S = 900.0
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{engine: (engine, {}) for engine in ENGINES},
    **{f"{engine} in bfloat16": (engine, {"dtype": "bfloat16"}) for engine in ENGINES},
    "fsdp with adapters": ("fsdp", {"lora": LoraConfig(rank=4, alpha=8)}),
    "fsdp with adapters in bfloat16": ("fsdp", {"lora": LoraConfig(rank=4, alpha=8), "dtype": "bfloat16"}),
    "fsdp with two policies": (
        "fsdp",
        {"lora": LoraConfig(rank=4, alpha=8), "policies": {"a": PolicyConfig(), "b": PolicyConfig(every=2)}},
    ),
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


@pytest.fixture
def engine(case: str) -> str:
    return CASES[case][0]


@dataclass
class Rank:
    """One rank with a critic, and with what its functions carry."""

    policy: PolicyTrainer
    critic: CriticTrainer
    state: TrainingState
    checkpoint: MemoryCheckpoint
    preparation: Preparation

    def update(self, seed: int) -> None:
        rows, _ = self.preparation.apply(random_rows(6, seed=seed), seed)
        returns = [np.full(length, 0.1 * seed, np.float32) for length in rows.lengths("response_ids")]
        rows = rows.with_column("returns", returns).with_column("old_values", self.critic.values(rows))
        self.critic.update(rows, value_loss)
        for policy in self.policy.policies:
            if seed % self.policy.config.every(policy) == 0:
                with self.policy.using(policy):
                    self.policy.update(rows, loss_with_noise)

    def everything(self) -> dict[str, torch.Tensor]:
        pieces = {piece.name: piece.values.clone() for piece in self.state.pieces_of_rank()}
        return pieces | {"carried": torch.tensor(list(self.state.carried().encode()))}


def loss_with_noise(
    logprobs: torch.Tensor, mask: torch.Tensor, totals: Any, weighted: torch.Tensor, behavior_logprobs: torch.Tensor
) -> Any:
    """Draws from torch's generator, as a loss may."""
    advantage = weighted * torch.rand(len(weighted))
    return ppo_clip_loss(logprobs, mask, totals, advantage, behavior_logprobs, logprobs.detach())


def grown(advantage: torch.Tensor, state: list[int]) -> tuple[torch.Tensor, list[int]]:
    return advantage * len(state), [*state, len(state)]


@pytest.fixture
def make_rank(
    case: str, model_path: str, engine_options: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(root: Path = tmp_path, **options: Any) -> Rank:
        config = TrainerConfig(
            **engine_options | CASES[case][1] | options, max_steps=10,
            optimizer=OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=2),
        )  # fmt: skip
        policy = PolicyTrainer(config, model_path)
        critic = CriticTrainer(replace(config, policies={}), model_path)
        flow = Dataflow()
        flow.compute(grown, reads=["advantage"], writes=[Column("weighted", "float32")], per="batch", state=[1])
        columns = {"advantage": STANDARD_COLUMNS["advantage"], **flow.columns}
        preparation = Preparation(flow.in_trainer, columns, policy.ranks.gather)
        state = TrainingState({"policy": policy, "critic": critic}, preparation=preparation)
        made.append(Rank(policy, critic, state, MemoryCheckpoint(state, policy, str(root)), preparation))
        return made[-1]

    yield make
    for rank in reversed(made):
        rank.checkpoint.close()
        rank.critic.close()
        rank.policy.close()


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_a_new_rank_goes_on_from_the_copy_bit_for_bit(make_rank: Callable[..., Rank], tmp_path: Path) -> None:
    dead = make_rank()
    for step in (1, 2):
        dead.update(step)
        assert dead.checkpoint.save(step) is None
    at_two = dead.everything()
    dead.update(3)
    expected = dead.everything()
    anew = make_rank()
    assert copied_steps(tmp_path, 0) == [1, 2]
    anew.checkpoint.restore(2)
    assert_same(anew.everything(), at_two)
    assert (anew.policy.num_updates, anew.critic.num_updates) == (2, 2)
    assert {name: count.tolist() for name, count in anew.policy.counters.items()} == (
        {"counters/a": [2, 2], "counters/b": [1, 1]} if len(anew.policy.policies) > 1 else {"counters": [2, 2]}
    )
    anew.update(3)
    assert_same(anew.everything(), expected)
    assert anew.checkpoint.save(3) is None
    assert copied_steps(tmp_path, 0) == [2, 3]


class Filled:
    """An event of a device after the filling of a buffer."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        log.append("filled")

    def synchronize(self) -> None:
        self._log.append("waited")


def test_a_copy_from_a_device_is_whole_before_the_next_optimizer_step(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counters and the generator's state are the host's; all else comes through buffers that hold a few tensors."""
    log: list[str] = []
    rank = make_rank()
    rank.update(1)
    rank.checkpoint.save(1)
    plain = rank.checkpoint.slots.copies()[1]
    monkeypatch.setattr(memory_checkpoint, "needs_buffers", lambda values: len(values) > 16)
    monkeypatch.setattr(memory_checkpoint, "DeviceCopies", lambda write: DeviceCopies(write, 2**15))
    monkeypatch.setattr(memory_checkpoint, "BLOCK_BYTES", 2**14)
    monkeypatch.setattr(publications, "mark", lambda device: Filled(log))
    step = rank.policy.engine.optimizer_step
    monkeypatch.setattr(rank.policy.engine, "optimizer_step", lambda rate: log.append("optimizer") or step(rate))
    rank.checkpoint.save(1)
    assert log[0] == "filled"
    assert log[-1] == "waited"
    assert log.count("filled") == log.count("waited") > 2
    slot, header = rank.checkpoint.slots.copies()[1]
    files = [rank.checkpoint.slots.data(number).read_bytes() for number in (plain[0], slot)]
    assert files[0] == files[1]
    assert sum(block.num_bytes for block in header.blocks) == plain[1].num_bytes
    rank.update(2)
    rank.checkpoint.save(2)
    assert log.index("optimizer") > 2
    expected = rank.everything()
    anew = make_rank()
    anew.checkpoint.restore(2)
    assert_same(anew.everything(), expected)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies go on once it is set."""
    go, copy = threading.Event(), memory_checkpoint.copy_and_sum

    def wait_and_copy(*arguments: Any) -> str:
        assert go.wait(NET_S)
        return copy(*arguments)

    monkeypatch.setattr(memory_checkpoint, "copy_and_sum", wait_and_copy)
    return go


@pytest.mark.parametrize("case", ENGINES, indirect=True)
def test_a_copy_beside_passes_is_whole_before_the_next_optimizer_step(
    make_rank: Callable[..., Rank], held_up: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forward and backward passes of the next step are made while it is held up."""
    rank = make_rank()
    expected, log = rank.everything(), list[str]()
    rank.checkpoint.begin(1)
    assert rank.checkpoint.seconds_under_way is not None
    backward, step = rank.policy.engine.backward, rank.policy.engine.optimizer_step

    def pass_backward(loss: torch.Tensor) -> None:
        backward(loss)
        log.append(f"backward {copied_steps(tmp_path, 0)}")
        held_up.set()

    def make_step(rate: float) -> float:
        log.append(f"optimizer {copied_steps(tmp_path, 0)}")
        return step(rate)

    monkeypatch.setattr(rank.policy.engine, "backward", pass_backward)
    monkeypatch.setattr(rank.policy.engine, "optimizer_step", make_step)
    rank.policy.update(random_rows(6, seed=2), ppo_clip_loss)
    assert log == ["backward []", "optimizer [1]"]
    assert rank.checkpoint.finish(1) is None
    assert rank.checkpoint.finish(1) is None
    assert rank.checkpoint.seconds_under_way is None
    anew = make_rank()
    anew.checkpoint.restore(1)
    assert_same(anew.everything(), expected)


def test_copies_beside_passes_are_those_within_steps_bit_for_bit(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    files = []
    for root in (tmp_path / "within", tmp_path / "beside"):
        rank = make_rank(root)
        for step in (1, 2, 3):
            torch.manual_seed(step)
            rank.update(step)
            if root.name == "within":
                rank.checkpoint.save(step)
            else:
                rank.checkpoint.begin(step)
        if root.name == "beside":
            assert rank.checkpoint.finish(3) is None
        assert copied_steps(root, 0) == [2, 3]
        files.append([(root / "rank-0" / f"slot-{slot}").read_bytes() for slot in SLOTS])
    assert files[0] == files[1]


def test_a_step_whose_copy_was_not_begun_is_refused(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.checkpoint.begin(1)
    with pytest.raises(PartnerGone, match="rank 0 has not begun to copy its state after step 2"):
        rank.checkpoint.finish(2)


def test_a_thread_whose_copy_fails_tells_it_once_and_gives_the_memory_back(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = make_rank()

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(memory_checkpoint, "copy_and_sum", fail)
    rank.checkpoint.begin(1)
    problem = rank.checkpoint.finish(1)
    assert problem is not None
    assert "the state of rank 0 could not be kept there" in problem
    rank.update(1)
    rank.checkpoint.begin(2)
    assert rank.checkpoint.finish(2) is None
    assert not (tmp_path / "rank-0").exists()


@pytest.mark.parametrize("num_copies", [0, 1])
def test_so_it_does_where_the_runs_directory_is_gone(
    make_rank: Callable[..., Rank], tmp_path: Path, num_copies: int
) -> None:
    root = tmp_path / "states" / "policy"
    root.parent.mkdir()
    rank = make_rank(root)
    for step in range(1, 1 + num_copies):
        rank.checkpoint.begin(step)
        assert rank.checkpoint.finish(step) is None
    shutil.rmtree(root.parent)
    rank.checkpoint.begin(1 + num_copies)
    with pytest.raises(PartnerGone, match=r"the agent of the node of rank 0 has ended.*/states/policy"):
        rank.checkpoint.finish(1 + num_copies)
    assert not root.parent.exists()


def test_an_earlier_step_is_as_good_and_those_after_it_count_no_more(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    rank = make_rank()
    states = {}
    for step in (1, 2):
        rank.update(step)
        rank.checkpoint.save(step)
        states[step] = rank.everything()
    anew = make_rank()
    anew.checkpoint.restore(1)
    assert_same(anew.everything(), states[1])
    assert copied_steps(tmp_path, 0) == [1]


def test_pages_are_written_again_and_not_made_anew(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.update(1)
    seen = []
    for step in range(1, 5):
        rank.checkpoint.save(step)
        files = [rank.checkpoint.slots.data(slot) for slot in SLOTS]
        seen.append([(file.stat().st_ino, file.stat().st_blocks) for file in files])
    assert seen == seen[:1] * 4


def test_a_step_without_a_copy_is_refused_by_name(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.update(1)
    rank.checkpoint.save(1)
    before = rank.everything()
    with pytest.raises(
        MemoryCheckpointError, match=r"rank-0 has no whole copy of step 2, only of steps \[1\]\. Go on from"
    ):
        rank.checkpoint.restore(2)
    assert_same(rank.everything(), before)


@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_damaged_copy_is_refused_and_changes_nothing(make_rank: Callable[..., Rank], where: float) -> None:
    rank = make_rank()
    rank.update(1)
    rank.checkpoint.save(1)
    file = rank.checkpoint.slots.data(0)
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1
    file.write_bytes(data)
    anew = make_rank()
    before = anew.everything()
    with pytest.raises(MemoryCheckpointError, match=r"copy of step 1 is damaged: 1 of its [0-9]+ blocks"):
        anew.checkpoint.restore(1)
    assert_same(anew.everything(), before)


def test_another_trainers_copy_is_refused_by_the_tensor(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.update(1)
    rank.checkpoint.save(1)
    other = make_rank(lora=LoraConfig(rank=4, alpha=8))
    with pytest.raises(
        MemoryCheckpointError, match=r"of another trainer: 'policy/weights/.*lora.*, and nothing in the copy"
    ):
        other.checkpoint.restore(1)


def test_a_copy_of_more_ranks_is_refused(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.update(1)
    rank.checkpoint.save(1)
    slots = rank.checkpoint.slots
    slots.seal(0, msgspec.structs.replace(slots.copies()[1][1], num_ranks=2))
    with pytest.raises(MemoryCheckpointError, match="of a trainer of 2 ranks, and this one has 1"):
        rank.checkpoint.restore(1)


def test_without_room_it_is_told_once_and_the_rank_goes_on(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_checkpoint, "PUBLICATIONS", 2**50)
    rank = make_rank()
    num_bytes = sum(piece.values.nbytes for piece in rank.state.pieces_of_rank())
    problem = rank.checkpoint.save(1)
    assert problem is not None
    assert f"rank 0: two copies of {num_bytes:,} bytes are needed" in problem
    assert "faults.keep_state=false" in problem
    assert rank.checkpoint.save(2) is None
    assert not (tmp_path / "rank-0").exists()
    rank.update(1)


@pytest.mark.parametrize("num_copies", [0, 1])
def test_where_the_runs_directory_is_gone_its_agent_is_and_the_step_fails(
    make_rank: Callable[..., Rank], tmp_path: Path, num_copies: int
) -> None:
    """A step that counted as made without its copies would be lost with the node. Nobody would remove new files."""
    root = tmp_path / "states" / "policy"
    root.parent.mkdir()
    rank = make_rank(root)
    for step in range(1, 1 + num_copies):
        assert rank.checkpoint.save(step) is None
    shutil.rmtree(root.parent)
    with pytest.raises(PartnerGone, match=r"the agent of the node of rank 0 has ended.*/states/policy"):
        rank.checkpoint.save(1 + num_copies)
    assert not root.parent.exists()


def test_a_copy_that_fails_later_ends_the_copies_and_nothing_else(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = make_rank()
    assert rank.checkpoint.save(1) is None

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(memory_checkpoint, "copy_and_sum", fail)
    problem = rank.checkpoint.save(2)
    assert problem is not None
    assert "the state of rank 0 could not be kept there ([Errno 5] Input/output error)" in problem
    assert rank.checkpoint.save(3) is None
    assert copied_steps(tmp_path, 0) == []


def test_what_cannot_be_carried_ends_the_copies_by_the_stages_name(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.preparation.workers["grown"].state = [object()]
    problem = rank.checkpoint.save(1)
    assert problem is not None
    assert "stage 'grown'" in problem
    assert rank.checkpoint.save(2) is None


def test_ranks_with_the_same_rows_wait_for_each_others_copies(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them completes the rows for all."""
    rank, waited = make_rank(), []
    monkeypatch.setattr(rank.policy.ranks, "num_peers", 2)
    monkeypatch.setattr(rank.policy.ranks, "barrier", lambda: waited.append(copied_steps(tmp_path, 0)))
    rank.checkpoint.save(1)
    rank.checkpoint.give_up()
    rank.checkpoint.save(2)
    assert waited == [[1], []]


@pytest.mark.parametrize("is_saved", [False, True])
def test_room_for_a_checkpoints_copy_is_asked_for_where_there_are_checkpoints(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_saved: bool
) -> None:
    rank, asked = make_rank(), []
    monkeypatch.setattr(memory_checkpoint, "reserve_slots", lambda *arguments: asked.append(arguments[-1]) or "none")
    MemoryCheckpoint(rank.state, rank.policy, str(tmp_path), is_saved=is_saved).save(1)
    assert asked == [rank.state.save_bytes if is_saved else 0]
    assert rank.state.save_bytes >= sum(piece.values.nbytes for piece in rank.state.pieces())
