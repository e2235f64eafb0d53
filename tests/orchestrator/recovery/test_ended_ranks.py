"""A hang of ranks under NCCL ends in SIGABRT of torch's watchdog: it is named and recovered from as one under gloo."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.algorithms.graph.loss import LossInputs, LossOutput
from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError, WorkerDied
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery.ended_ranks import named_failure, naming_failures
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.session import session
from tests.fakes.actors import FakeHandle
from tests.model_files import load_model
from tests.run_files import events_of, metrics_of
from tests.workers.trainer.watchdog_text import end_as_the_watchdog_does, timed_out

DEATH = WorkerDied("Trainer-policy-0 has died (its worker process has died). Out of memory is the usual reason.")
TEAM = ["Trainer-policy-0", "Trainer-policy-1"]


class Ranks:
    """Stands where a fleet of two ranks on one node does. `printed`: their last lines; `records`: files of theirs."""

    def __init__(self, printed: dict[str, list[str]], records: dict[str, bytes] | None = None) -> None:
        self._printed, self._records = printed, records or {}
        self.agents = SimpleNamespace(root="/shared/run")

    def plan_of(self, name: str) -> Any:
        return SimpleNamespace(role="trainer", stage="train")

    def teams(self, *roles: str) -> list[list[str]]:
        return [TEAM]

    def agent_of(self, name: str) -> tuple[str, Any]:
        return "Agent-10.0.0.1", FakeHandle(
            take_end=lambda names: {name: self._printed.get(name, []) for name in names}
        )

    async def collect(self, directory: str, places: dict[str, str]) -> None:
        assert set(places.values()) == {"/shared/run/stacks/train"}
        Path(directory).mkdir(parents=True)
        for name, data in self._records.items():
            (Path(directory) / name).write_bytes(data)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made: Any = SimpleNamespace(path=tmp_path)
    return made


def named(ranks: Ranks, directory: RunDirectory, failure: Exception = DEATH) -> Exception:
    fleet: Any = ranks
    return asyncio.run(named_failure(fleet, directory, TEAM, failure))


def test_an_aborted_ranks_death_is_a_missed_deadline_with_the_last_calls(directory: RunDirectory) -> None:
    found = named(Ranks({TEAM[0]: timed_out(0, 30.0)}, {"nccl_rank_0": b"0", "nccl_rank_1": b"1"}), directory)
    assert type(found) is DeadlineExceeded
    assert "Trainer-policy-1 did not answer within 30 s" in str(found)
    (folder,) = (directory.path / "stacks").iterdir()
    assert {file.name for file in folder.iterdir()} == {"nccl_rank_0", "nccl_rank_1"}
    assert f"`torchfrtrace {folder} --prefix nccl_rank_`" in str(found)


def test_without_a_record_no_folder_is_left(directory: RunDirectory) -> None:
    found = named(Ranks({TEAM[0]: timed_out(0, 30.0)}), directory)
    assert type(found) is DeadlineExceeded
    assert "torchfrtrace" not in str(found)
    assert not [*(directory.path / "stacks").iterdir()]


@pytest.mark.parametrize("failure", [DEATH, DeadlineExceeded("step 3"), PartnerGone("rank 1 is gone")])
def test_other_losses_keep_their_name(failure: PenstockError, directory: RunDirectory) -> None:
    assert named(Ranks({TEAM[0]: ["Killed"]}), directory, failure) is failure


def test_a_rank_that_is_ended_while_it_starts_is_named_as_well(directory: RunDirectory) -> None:
    fleet: Any = Ranks({TEAM[1]: timed_out(1, 30.0)})
    late = pytest.raises(DeadlineExceeded, match="Trainer-policy-0 did not answer within 30 s")
    with late, naming_failures(fleet, directory):
        raise DEATH


ALGORITHM = """
import os
from pathlib import Path
import torch.distributed as dist
from penstock import AlgorithmConfig, Dataflow, LossOutput, algorithm
from dataclasses import dataclass
from tests.workers.trainer.watchdog_text import end_as_the_watchdog_does

@dataclass
class Config(AlgorithmConfig):
    name: str = "hangs_once"
    marker: str = ""

def loss_of(marker):
    def loss(inputs):
        if marker and inputs.logprobs.requires_grad:
            with open(f"{marker}-{dist.get_rank()}", "a") as calls:
                calls.write("x")
            if dist.get_rank() == 0 and Path(f"{marker}-0").stat().st_size == AT:
                end_as_the_watchdog_does(0, 30.0)
        return LossOutput(-inputs.logprobs * inputs.advantage, {})
    return loss

@algorithm("hangs_once")
def hangs_once(cfg: Config) -> Dataflow:
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=4)
    flow.reward()
    flow.compute(lambda reward: reward - reward.mean(), per="group", reads=["reward"], writes=["advantage"])
    flow.train("policy", loss=loss_of(cfg.marker))
    return flow
"""


@pytest.mark.real
def test_a_run_whose_rank_is_ended_by_the_watchdog_recovers_as_from_a_hang(
    small_run: list[str], cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(ALGORITHM.replace("AT", "3"))
    words = [
        *small_run, "rollout.engine=hf", "trainer.num_ranks=2", "trainer.max_steps=4", f"imports=[{tmp_path}/hangs.py]",
        "algorithm=hangs_once", f"output_dir={tmp_path}", "faults.pause_s=0.1",
    ]  # fmt: skip
    words = [word for word in words if not word.startswith("algorithm.group_size")]
    whole = run(load_config([*words, "name=whole"]), quiet=True).directory
    directory = run(load_config([*words, "name=ended", f"algorithm.marker={tmp_path}/calls"]), quiet=True).directory
    assert [line["step"] for line in metrics_of(directory)] == [1, 2, 3, 4]
    events = events_of(directory)
    (fault,) = (event for event in events if event["kind"] == "fault")
    assert fault["error"] == "DeadlineExceeded"
    assert "Trainer-policy-1 did not answer within 30 s" in fault["message"]
    assert {"recovered"} == {event["kind"] for event in events} & {"recovered", "returned", "given_up"}
    (record,) = directory.glob("stacks/Trainer-policy-0-*/nccl_rank_0")
    assert record.read_bytes() == b"what rank 0 called"
    assert any("Watchdog caught" in line for line in (directory / "logs/Trainer-policy-0.log").read_text().splitlines())
    expected, found = load_model(whole / "model"), load_model(directory / "model")
    assert all(expected[name].equal(found[name]) for name in expected)


def end_rank_0(inputs: LossInputs) -> LossOutput:
    if dist.get_rank() == 0:
        end_as_the_watchdog_does(0, 30.0)
    return LossOutput(-inputs.logprobs, {})


@pytest.mark.real
def test_a_session_names_a_rank_that_is_ended_by_the_watchdog(
    small_run: list[str], cluster: str, tmp_path: Path
) -> None:
    words = [*small_run, "rollout.engine=hf", "trainer.num_ranks=2", f"output_dir={tmp_path}", "name=own"]
    late = pytest.raises(DeadlineExceeded, match="Trainer-policy-1 did not answer within 30 s")
    with late, session(load_config(words)) as handles:
        handles.policy.update(handles.policy.generate(handles.prompts.next(2), n=2), end_rank_0)
    assert list((tmp_path / "own").glob("stacks/Trainer-policy-0-*/nccl_rank_0"))
    assert "Watchdog caught" in (tmp_path / "own/logs/Trainer-policy-0.log").read_text()
