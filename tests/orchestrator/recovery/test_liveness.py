"""Who does not answer is silent, who answers and does not go on is stuck, and nobody else is either."""

import asyncio
from types import SimpleNamespace as Some
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.faults import CheckpointConfig, FaultsConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import WeightsConfig
from penstock.orchestrator.recovery import liveness
from penstock.orchestrator.recovery.liveness import ALIVE, Liveness, Verdict, VerdictKind, Watch, deadlines_of
from penstock.workers.runtime.processes import ProcessId
from penstock.workers.runtime.serving import (
    ASLEEP,
    COMPUTING,
    IDLE,
    LOADING,
    PUBLISHING,
    SAVING,
    SERVING,
    STARTING,
    UPDATING,
    WAITING,
    Progress,
)
from tests.fakes.actors import FakeHandle, never
from tests.orchestrator.one_machine import OneMachine
from tests.virtual_time import run_virtually

CONFIG = RunConfig(
    faults=FaultsConfig(heartbeat_s=10.0, heartbeat_timeout_s=60.0, stall_s=300.0),
    trainer=TrainerConfig(step_timeout_s=900.0),
    weights=WeightsConfig(phase_timeout_s=20.0),
    checkpoint=CheckpointConfig(timeout_s=400.0),
)
ROLES = ("rollout", "trainer", "scorer", "reward", "compute", "prompts")


def beats(
    liveness: Liveness, until: float, progress: Progress | None, since: float = 0.0, step_s: float = 10.0
) -> Verdict:
    """The verdict at `until`, of a member that says the same at every heartbeat, or nothing."""
    now, verdict = since, ALIVE
    while now < until:
        now = min(now + step_s, until)
        if progress is not None:
            liveness.heard(now, progress)
        verdict = liveness.judge(now)
    return verdict


@pytest.mark.parametrize("role", ROLES)
def test_who_answers_and_has_nothing_to_do_is_alive_for_ever(role: str) -> None:
    assert beats(Liveness(role, CONFIG, 0.0), 1e5, Progress(SERVING, 1e5)) == ALIVE


@pytest.mark.parametrize("role", ROLES)
def test_who_does_not_answer_is_silent_after_the_timeout_and_not_before(role: str) -> None:
    assert beats(Liveness(role, CONFIG, 0.0), 59.9, None) == ALIVE
    verdict = beats(Liveness(role, CONFIG, 0.0), 60.0, None)
    assert verdict == Verdict(VerdictKind.SILENT, "no answer to a heartbeat for 60 s")


def test_an_answer_ends_the_silence() -> None:
    liveness = Liveness("reward", CONFIG, 0.0)
    assert beats(liveness, 70.0, None).state is VerdictKind.SILENT
    liveness.heard(71.0, Progress(SERVING, 71.0))
    assert liveness.judge(71.0) == ALIVE
    assert beats(liveness, 130.0, None, since=71.0) == ALIVE
    assert beats(liveness, 131.0, None, since=130.0).state is VerdictKind.SILENT


def test_a_watcher_that_was_away_blames_nobody_for_the_gap() -> None:
    """Its machine was suspended for an hour."""
    liveness = Liveness("rollout", CONFIG, 0.0)
    liveness.heard(5.0, Progress(SERVING, 5.0, 100, 4))
    assert liveness.judge(3600.0) == ALIVE
    liveness.heard(3601.0, Progress(SERVING, 6.0, 100, 4))
    assert liveness.judge(3601.0) == ALIVE
    assert beats(liveness, 3700.0, None, since=3601.0).state is VerdictKind.SILENT


@pytest.mark.parametrize(
    ("role", "phase", "deadline_s"),
    [
        ("rollout", LOADING, 200.0),
        ("rollout", STARTING, 300.0),
        ("trainer", UPDATING, 900.0),
        ("trainer", PUBLISHING, 200.0),
        ("trainer", SAVING, 400.0),
        ("scorer", COMPUTING, 900.0),
        ("compute", COMPUTING, 900.0),
    ],
)
def test_a_phase_that_takes_longer_than_its_deadline_is_stuck(role: str, phase: str, deadline_s: float) -> None:
    assert deadlines_of(role, CONFIG)[phase] == deadline_s
    liveness = Liveness(role, CONFIG, 0.0)
    liveness.heard(1.0, Progress(phase, deadline_s))
    assert liveness.judge(1.0) == ALIVE
    liveness.heard(2.0, Progress(phase, deadline_s + 1))
    verdict = liveness.judge(2.0)
    assert verdict.state is VerdictKind.STUCK
    assert verdict.reason == f"{phase} for {deadline_s + 1:.0f} s, and {deadline_s:g} s are its deadline"


def test_an_engine_that_compiles_has_longer_to_start_than_a_rank() -> None:
    config = RunConfig(rollout=RolloutConfig(start_timeout_s=300.0, compile_timeout_s=600.0, enforce_eager=False))
    assert deadlines_of("rollout", config)[STARTING] == 900.0
    assert deadlines_of("trainer", config)[STARTING] == 300.0
    assert deadlines_of("rollout", CONFIG)[STARTING] == CONFIG.rollout.start_timeout_s


@pytest.mark.parametrize(
    ("role", "phase"), [("trainer", WAITING), ("trainer", IDLE), ("rollout", ASLEEP), ("reward", SERVING)]
)
def test_who_waits_for_others_is_never_stuck(role: str, phase: str) -> None:
    assert beats(Liveness(role, CONFIG, 0.0), 1e5, Progress(phase, 1e5)) == ALIVE


def test_an_engine_without_a_new_token_is_stuck() -> None:
    liveness = Liveness("rollout", CONFIG, 0.0)
    assert beats(liveness, 300.0, Progress(SERVING, 1.0, 100, 4)) == ALIVE
    verdict = beats(liveness, 310.0, Progress(SERVING, 1.0, 100, 5), since=300.0)
    assert verdict == Verdict(VerdictKind.STUCK, "5 samples in flight and no token for 300 s")


def test_tokens_an_idle_moment_and_a_load_of_weights_all_begin_the_stall_anew() -> None:
    same = Progress(SERVING, 1.0, 100, 4)
    for other in (Progress(SERVING, 1.0, 101, 4), Progress(SERVING, 1.0, 100, 0), Progress(LOADING, 1.0, 100, 4)):
        liveness = Liveness("rollout", CONFIG, 0.0)
        assert beats(liveness, 300.0, same) == ALIVE
        assert beats(liveness, 310.0, other, since=300.0) == ALIVE
        assert beats(liveness, 600.0, same, since=310.0) == ALIVE
        assert beats(liveness, 640.0, same, since=600.0).state is VerdictKind.STUCK


def test_only_engines_stall() -> None:
    """A reward has a deadline of its own, a trainer its phases."""
    for role in set(ROLES) - {"rollout"}:
        assert beats(Liveness(role, CONFIG, 0.0), 2000.0, Progress(SERVING, 1.0, 100, 4)) == ALIVE


SAMPLES = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.none()
        | st.builds(
            Progress,
            st.sampled_from([SERVING, LOADING, ASLEEP]),
            st.floats(0, 400),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
    ),
    max_size=60,
)


@given(st.sampled_from(ROLES), SAMPLES)
def test_every_verdict_has_its_reason(role: str, samples: list[tuple[float, Progress | None]]) -> None:
    liveness, now, heard, last = Liveness(role, CONFIG, 0.0), 0.0, 0.0, None
    for seconds, progress in samples:
        now += seconds
        if progress is not None:
            liveness.heard(now, progress)
            heard, last = now, progress
        verdict = liveness.judge(now)
        if verdict.state is VerdictKind.SILENT:
            assert now - heard >= CONFIG.faults.heartbeat_timeout_s
        elif verdict.state is VerdictKind.STUCK:
            assert last is not None
            late = last.phase_s > deadlines_of(role, CONFIG).get(last.phase, float("inf"))
            stalled = role == "rollout" and last.num_in_flight > 0 and now >= CONFIG.faults.stall_s
            assert late or stalled
        assert bool(verdict.reason) == (verdict.state is not VerdictKind.ALIVE)


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=80), st.integers(0, 3))
def test_a_member_that_goes_on_is_alive_however_often_it_is_asked(gaps: list[float], num_in_flight: int) -> None:
    liveness, now = Liveness("rollout", CONFIG, 0.0), 0.0
    for tokens, seconds in enumerate(gaps):
        now += seconds
        liveness.heard(now, Progress(SERVING, now, tokens, num_in_flight))
        assert liveness.judge(now) == ALIVE


@given(st.integers(-(10**6), 10**6), st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40))
def test_it_does_not_matter_when_time_began(start: int, history: list[tuple[int, bool]]) -> None:
    def verdicts(now: float) -> list[Verdict]:
        liveness, found = Liveness("rollout", CONFIG, now), []
        for seconds, answers in history:
            now += seconds
            if answers:
                liveness.heard(now, Progress(SERVING, 1.0, 7, 1))
            found.append(liveness.judge(now))
        return found

    assert verdicts(0.0) == verdicts(float(start))


def test_members_that_hang_together_are_ended_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of a machine that is nearly lost may take a minute for each."""
    monkeypatch.setattr(liveness, "time", Some(monotonic=lambda: asyncio.get_running_loop().time()))

    async def main() -> dict[str, str]:
        together, found, ended, removed = asyncio.Event(), dict[str, str](), list[Any](), list[str]()

        async def stacks(process: ProcessId, name: str) -> str:
            found[name] = "it hangs"
            if len(found) == 2:
                together.set()
            await together.wait()
            return found[name]

        members = [
            ("rollout", name, FakeHandle(process=ProcessId.own(), progress=lambda: never()))
            for name in ("Rollout-0", "Rollout-1")
        ]
        named = [(name, handle) for _, name, handle in members]
        agent = FakeHandle(process=None, progress=None, dump_stacks=stacks)
        agent.kill = FakeHandle(killed="").killed  # type: ignore[method-assign]
        fleet = Some(
            watched=[("agent", "Agent", agent), *members], stacks_root="", agent_of=lambda name: ("Agent", agent),
            roll_call=OneMachine(lambda role: []).roll_call, owner=Some(end=ended.append),
            is_lent=lambda name: name == "Rollout-1", handle_of=dict(named).get, remove=removed.extend,
        )  # fmt: skip
        directory = Mock()
        watching = asyncio.ensure_future(Watch(fleet, CONFIG, directory).run())  # type: ignore[arg-type]
        await asyncio.wait([watching], timeout=100)
        watching.cancel()
        assert set(ended) == {handle for _, _, handle in members}
        assert set(removed) == {"Rollout-1"}, "the engine that is lent is replaced, though nobody may call it"
        return dict(call.args for call in directory.write_stacks.call_args_list)

    assert run_virtually(main()) == {"Rollout-0": "it hangs", "Rollout-1": "it hangs"}
