"""Attempts start as the engines' memory allows: the control by itself, the gate, and both over simulated engines."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.agents.admission import CUT, FULL, AdmissionControl, AttemptGate, num_reread
from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.protocols import Completion, KvLoad, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine
from penstock.workers.rollout.rollout_worker import GroupIntake
from penstock.workers.rollout.scripted_memory import MemoryModel
from tests.virtual_time import run_virtually


def load(usage: float = 0.1, num_preempted: int = 0, num_waiting: int = 0, num_fitting: float = 8.0) -> KvLoad:
    return KvLoad(num_fitting, usage, 10, num_waiting, num_preempted)


def test_the_first_limit_is_what_fits_whatever_the_attempts_do() -> None:
    control = AdmissionControl(1024, num_actors=2, limit=1)
    assert control.report({"a": load(num_fitting=12.0), "b": load(num_fitting=6.0)}, []) == 9


def test_free_memory_multiplies_the_limit_within_seconds() -> None:
    control = AdmissionControl(1024, limit=1)
    for _ in range(12):
        control.ended(1.0)
        control.report({"a": load(usage=0.02)}, [0.5] * control.limit)
    assert control.limit == 1024


def test_a_preemption_costs_an_eighth_once_and_not_while_attempts_drain() -> None:
    control = AdmissionControl(1024, limit=1)
    before = control.report({"a": load(usage=FULL, num_fitting=100.0)}, [])
    after = control.report({"a": load(usage=FULL, num_preempted=3)}, [10.0] * before)
    assert after == int(before * CUT)
    assert control.report({"a": load(usage=FULL, num_preempted=9)}, [10.0] * before) == after


def test_what_an_engine_reads_again_costs_as_a_preemption_does() -> None:
    control = AdmissionControl(1024, limit=1)
    before = control.report({"a": load(num_fitting=100.0)}, [])
    assert control.report({"a": load()}, [10.0] * before, reread=11.0) == int(before * CUT)


def test_a_full_engine_of_three_costs_only_its_own_window() -> None:
    control = AdmissionControl(1024, limit=1)
    engines = {name: load(usage=FULL, num_fitting=100.0) for name in "abc"}
    before = control.report(engines, [])
    calm = {name: load(usage=FULL) for name in "ab"}
    assert control.report({**calm, "c": load(usage=FULL, num_preempted=1)}, [10.0] * before) == 200 + int(100 * CUT)


def test_a_window_grows_no_further_than_the_upper_bound() -> None:
    control = AdmissionControl(64, limit=1)
    for _ in range(10_000):
        control.report({"a": load(usage=0.2)}, [2.5] * control.limit)
    for number in range(1, 6):
        control.ended(2.5)
        control.report({"a": load(usage=1.0, num_preempted=number)}, [2.5] * control.limit)
    assert control.limit < 64


def test_an_engine_that_misses_a_report_keeps_its_window() -> None:
    control = AdmissionControl(1024, limit=1)
    for _ in range(8):
        control.ended(1.0)
        control.report({"a": load(usage=0.1)}, [0.5] * control.limit)
    before = control.limit
    assert before > 100
    assert control.report({}, [0.5] * before) == before
    assert control.report({"a": load(usage=0.1)}, [0.5] * before) >= before


def test_groups_are_leased_while_less_than_one_waits() -> None:
    waiting = 0
    intake = GroupIntake("Environment-0", Sampling(), 0, group_size=8, max_samples=32, num_waiting=lambda: waiting)
    assert [intake.max_groups(num_held) for num_held in (0, 1, 4)] == [1, 2, 4]
    waiting = 8
    assert [intake.max_groups(num_held) for num_held in (0, 1, 4)] == [0, 1, 4]


def test_engines_that_report_no_memory_have_no_limit() -> None:
    control = AdmissionControl(7, limit=1)
    assert control.report({"a": None}, []) == 7
    assert control.report({"a": load(), "b": None}, []) == 7


LOADS = st.builds(
    KvLoad, st.floats(0.1, 1e4), st.floats(0, 1), st.integers(0, 500), st.integers(0, 2000), st.integers(0, 10**6)
)


@given(
    most=st.integers(1, 2000),
    reports=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), st.none() | LOADS), st.lists(st.floats(0, 1e4)), st.floats(0, 99)
        )
    ),
)
def test_the_limit_is_between_one_and_the_upper_bound_and_repeats(
    most: int, reports: list[tuple[Mapping[str, KvLoad | None], list[float], float]]
) -> None:
    def limits() -> list[int]:
        control = AdmissionControl(most, limit=1)
        found = []
        for loads, ages, reread in reports:
            for age in ages[:3]:
                control.ended(age)
            found.append(control.report(loads, ages, reread))
        return found

    found = limits()
    assert all(1 <= limit <= most for limit in found)
    assert found == limits()


def test_only_a_lost_prefix_is_read_again() -> None:
    def completion(num_cached: int | None, version: int = 3) -> Completion:
        return Completion([1], [0.0], [version], "", "stop", num_cached=num_cached)

    assert num_reread(1000, [3], completion(100)) == 1000 - 100 - 64
    assert num_reread(1000, [3], completion(960)) == 0
    assert num_reread(1000, [2], completion(0)) == 0  # new weights
    assert num_reread(1000, [3], completion(None)) == 0


def test_places_go_to_earlier_groups_first_and_a_cancelled_wait_takes_none() -> None:
    async def scenario() -> list[int]:
        gate, entered = AttemptGate(AdmissionControl(1)), list[int]()

        async def attempt(priority: int) -> None:
            async with gate.place(priority):
                entered.append(priority)
                await asyncio.sleep(1)

        attempts = [asyncio.create_task(attempt(priority)) for priority in (5, 9, 7, 0, 7)]
        await asyncio.sleep(0.5)
        attempts[2].cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        assert gate.num_under_way == 0
        return entered

    assert run_virtually(scenario()) == [5, 0, 7, 9]


def test_nobody_waits_longer_than_an_attempt_may_take() -> None:
    async def scenario() -> float:
        gate = AttemptGate(AdmissionControl(2, limit=1), patience_s=30.0)

        async def attempt() -> None:
            async with gate.place():
                await asyncio.sleep(1000)

        attempts = [asyncio.create_task(attempt()) for _ in range(3)]
        while gate.num_under_way < 2:
            await asyncio.sleep(1)
            gate.report({"a": load(usage=1.0, num_fitting=1.0)})
        waited = asyncio.get_running_loop().time()
        for one in attempts:
            one.cancel()
        return waited

    assert 30 <= run_virtually(scenario()) <= 32


# Workloads: tokens are a quarter of usual ones, and steps four times as long.


def draws(key: str) -> random.Random:
    return random.Random(key)


def prompt(key: object, length: int) -> list[int]:
    chance = random.Random(str(key))
    return [chance.randrange(90_000) for _ in range(length)]


Turns = list[tuple[int, float]]
"""Sampled tokens of each turn, and seconds of the tool after it."""


@dataclass(frozen=True)
class Workload:
    num_engines: int
    num_tokens: int
    max_model_len: int
    group_size: int
    num_prompt: int
    turns: Callable[[int, random.Random], Turns]
    best: tuple[int, ...]
    """Fixed numbers of attempts around the best one."""
    seconds: float = 600.0
    num_result: int = 0
    """Tokens of a tool's result."""


def short_or_long(group: int, chance: random.Random) -> Turns:
    return [(chance.randint(8, 40) if group % 2 else chance.randint(125, 875), 0.0)]


WORKLOADS = {
    "short and long answers": Workload(1, 48_000, 1024, 8, 50, short_or_long, (180,)),
    "shared long prefixes": Workload(
        1, 36_000, 1024, 16, 750, lambda _, chance: [(chance.randint(12, 180), 0.0)], (256,)
    ),
    "slow tools": Workload(
        1, 40_000, 2048, 8, 150, lambda _, chance: [(chance.randint(20, 60), chance.uniform(2, 20)) for _ in range(4)],
        (512,), 900.0, num_result=40,
    ),
    "a heavy tail": Workload(
        1, 24_000, 2048, 8, 40, lambda _, chance: [(int(min(800, 25 * chance.paretovariate(1.3))), 0.0)], (256,)
    ),
    "many engines": Workload(3, 24_000, 1024, 8, 50, short_or_long, (280,)),
}  # fmt: skip


class Simulation:
    """Attempts without end on simulated engines."""

    def __init__(self, work: Workload, control: AdmissionControl) -> None:
        self._work = work
        model = MemoryModel(
            work.num_tokens, work.max_model_len, step_s=0.04, sample_s=0.0004, read_s=0.0002, block_tokens=8
        )
        self._engines = {f"Rollout-{index}": ScriptedEngine(memory=model) for index in range(work.num_engines)}
        self._gate = AttemptGate(control)
        self._num_sampled = self._num_reread = self._num_here = 0

    async def run(self, *, follows: bool) -> tuple[float, int]:
        """Tokens a second, and the number of preemptions. `follows`: the limit follows the engines."""
        self._pool = EnginePool(self._ask, 1e9, asyncio.get_running_loop().time)
        self._pool.update(self._engines)
        tasks, group, before = set[asyncio.Task[None]](), 0, (0, 0)
        for _ in range(int(self._work.seconds)):
            if follows:
                now = (self._num_sampled, self._num_reread)
                loads = {name: engine.kv_load() for name, engine in self._engines.items()}
                self._gate.report(loads, (now[1] - before[1]) / max(1, now[0] - before[0]))
                before = now
            for _ in range(20):
                while self._num_here - self._gate.num_under_way < 2 * self._work.group_size:
                    for place in range(self._work.group_size):
                        self._num_here += 1
                        tasks.add(task := asyncio.create_task(self._attempt(group, place)))
                        task.add_done_callback(tasks.discard)
                    group += 1
                    await asyncio.sleep(0)
                await asyncio.sleep(0.05)
        preempted = sum(load.num_preempted for engine in self._engines.values() if (load := engine.kv_load()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._num_sampled / self._work.seconds, preempted

    async def _ask(self, engine: ScriptedEngine, prompt_ids: list[int], sampling: Sampling) -> Completion:
        (completion,) = await engine.generate(prompt_ids, 1, sampling)
        return completion

    async def _attempt(self, group: int, place: int) -> None:
        work, key = self._work, f"{group}/{place}"
        async with self._gate.place(group):
            ids, known = prompt(group, work.num_prompt), 0
            for number, (length, wait_s) in enumerate(work.turns(group, draws(key))):
                sampling = Sampling(max_tokens=length, seed=100 * number + place, priority=group)
                completion = await self._pool.sample(ids, sampling, asyncio.current_task())
                self._num_sampled += length
                self._num_reread += num_reread(known, completion.versions[:1], completion)
                ids = [*ids, *completion.token_ids]
                known = len(ids)
                await asyncio.sleep(wait_s)
                ids += prompt(f"{key}/{number}", work.num_result)
        self._num_here -= 1


def simulated(work: Workload, fixed: int | None = None) -> tuple[float, int]:
    control = AdmissionControl(1024, limit=1) if fixed is None else AdmissionControl(fixed)
    return run_virtually(Simulation(work, control).run(follows=fixed is None))


def check(work: Workload) -> None:
    rate, preempted = simulated(work)
    today, preempted_today = simulated(work, 1024)
    best = max(today, *(simulated(work, number)[0] for number in work.best), 0.0)
    assert rate >= 0.94 * best
    assert preempted_today < 100 or preempted <= 0.06 * preempted_today


@pytest.mark.parametrize("name", ["short and long answers", "a heavy tail"])
def test_admission_is_as_fast_as_the_best_number_and_seldom_preempts(name: str) -> None:
    check(WORKLOADS[name])


@pytest.mark.soak("test_admission_is_as_fast_as_the_best_number_and_seldom_preempts")
@pytest.mark.parametrize("name", ["shared long prefixes", "slow tools", "many engines"])
def test_so_it_is_with_shared_prefixes_with_tools_and_on_many_engines(name: str) -> None:
    check(WORKLOADS[name])
