"""Attempts begin as the engines' memory allows: the forecast, the gate, and both over simulated engines."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.agents.admission import (
    AdmissionControl,
    Attempt,
    AttemptGate,
    EngineReport,
    TurnShape,
    survival,
)
from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.agents.gateway.turn_sampler import num_reread
from penstock.workers.protocols import Completion, KvLoad, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine
from penstock.workers.rollout.rollout_worker import GroupIntake
from penstock.workers.rollout.scripted_memory import MemoryModel
from tests.virtual_time import run_virtually


def attempts(ages: Sequence[float]) -> list[Attempt]:
    return [Attempt(0, order, 0.0, None, 0.0, age=age) for order, age in enumerate(ages)]  # type: ignore[arg-type]


def report(
    usage: float = 0.0, ages: Sequence[float] = (), num_running: int | None = None, num_in_flight: int | None = None
) -> EngineReport:
    """Of an engine for 10,000 tokens, in sequences of at most 1,000. All attempts have memory, if nothing else is
    said."""
    num_running = len(ages) if num_running is None else num_running
    load = KvLoad(10_000, 1000, usage, num_running, 0.0, 0)
    return EngineReport(load, attempts(ages), num_running if num_in_flight is None else num_in_flight)


def control_after(ages_at_end: Sequence[float], num_actors: int = 1) -> AdmissionControl:
    """A control that has seen attempts end at these ages."""
    control = AdmissionControl(1024, num_actors, follows=True)
    control.report({"a": report()}, 0.0)
    for attempt in attempts(ages_at_end):
        control.ended(attempt, 0.0)
    return control


def test_before_the_first_report_one_attempt_is_under_way() -> None:
    assert [AdmissionControl(1024, follows=True).limit(number) for number in (0, 1)] == [1, 1]
    assert AdmissionControl(1024).limit(0) == 1024


def test_at_first_attempts_may_end_at_any_length() -> None:
    """Ten of the full length fit. Where as many end in each doubling of the length, from 3% of it on, those that are
    alive at a length have most memory at 1/e of the full one: 10 e ln(1 / 0.03) = 95."""
    for num_actors, number in ((1, 95), (2, 47)):
        control = AdmissionControl(1024, num_actors, follows=True)
        control.report({"a": report()}, 0.0)
        assert control.limit(0) == pytest.approx(number, rel=0.02)


def test_as_many_begin_as_fit_at_the_length_that_recent_ones_had() -> None:
    control = control_after([100.0] * 500)
    control.report({"a": report()}, 1.0)
    assert control.limit(0) == pytest.approx(100, rel=0.12)  # times ahead are a tenth apart
    control.report({"a": report(), "b": report()}, 2.0)
    assert control.limit(0) == pytest.approx(200, rel=0.12)


def test_what_those_under_way_will_need_is_kept_for_them() -> None:
    control = control_after([100.0] * 500)
    control.report({"a": report(usage=0.05, ages=[10.0] * 50)}, 1.0)
    assert control.limit(50) == pytest.approx(50 + 50, rel=0.12)


def test_an_attempt_that_ends_makes_no_room_for_one_that_will_need_more() -> None:
    control = control_after([100.0] * 500)
    control.report({"a": report(usage=0.9, ages=[90.0] * 100)}, 1.0)
    control.begun()
    allowed = control.limit(100) - 100
    assert [control.limit(number) - number for number in (50, 10)] == [allowed, allowed]


def test_full_engines_take_no_more_and_one_attempt_is_always_under_way() -> None:
    control = control_after([100.0] * 500)
    control.report({"a": report(usage=1.0, ages=[50.0] * 200)}, 1.0)
    assert (control.limit(200) <= 200, control.limit(0)) == (True, 1)


def test_attempts_that_wait_for_memory_are_counted_as_if_they_had_it() -> None:
    limits = []
    for num_in_flight in (40, 80):
        control = control_after([100.0] * 500)
        ages = [50.0] * 40 + [0.0] * (num_in_flight - 40)
        control.report({"a": report(0.2, ages, num_running=40, num_in_flight=num_in_flight)}, 1.0)
        limits.append(control.limit(num_in_flight))
    assert limits[0] == pytest.approx(limits[1], rel=0.1)


def test_long_conversations_keep_their_memory_while_tools_run() -> None:
    """Half of the attempts are in tools: to keep their memory costs as much as to read ten tokens a sampled one."""
    limits = []
    for continued in (1.0, 100.0):
        control = control_after([100.0] * 500)
        for second in range(1, 100):
            some = report(0.2, [50.0] * 80, num_running=40)
            control.report({"a": some}, float(second), TurnShape(continued=continued))
        limits.append(control.limit(80) - 80)
    assert limits[0] > 1.5 * limits[1] > 0


def test_forecasts_that_miss_keep_more_free() -> None:
    limits = []
    for usages in ([0.5] * 60, [0.4, 0.6] * 30):
        control = control_after([100.0] * 500)
        for second, usage in enumerate([*usages, 0.5], 1):
            control.report({"a": report(usage, [50.0] * 100)}, float(second))
        limits.append(control.limit(100))
    assert limits[0] > limits[1]


def test_ages_are_decode_steps_with_memory() -> None:
    control = AdmissionControl(1024, follows=True)
    both = attempts([0.0, 0.0])
    for second, num_steps in ((0, 100.0), (1, 150.0)):
        load = KvLoad(10_000, 1000, 0.1, 1, num_steps, 0)
        control.report({"a": EngineReport(load, both, 2)}, float(second))
    assert [attempt.age for attempt in both] == [50.0, 0.0]  # the second waits for memory


def test_while_engines_are_replaced_as_many_are_under_way_as_before() -> None:
    control = control_after([100.0] * 500)
    control.report({"a": report(0.5, [50.0] * 100)}, 1.0)
    control.hold(100)
    assert [control.limit(number) for number in (100, 90)] == [100, 100]
    control.report({"a": report(1.0, [50.0] * 100)}, 2.0)
    assert control.limit(90) <= 90


def test_engines_that_report_no_memory_have_no_limit() -> None:
    control = AdmissionControl(7, follows=True)
    control.report({"a": None}, 0.0)
    assert control.limit(3) == 7
    control.report({"a": report(), "b": None}, 1.0)
    assert control.limit(3) == 7


def test_shares_that_survive_count_those_that_have_not_ended() -> None:
    share = survival(np.array([10.0, 20.0]), np.array([15.0]), 100.0)
    assert share(np.array([5.0, 10.0, 20.0])) == pytest.approx([1.0, 3 / 4, 3 / 8])  # one of 4, then one of 2
    assert share(np.array([60.0, 100.0])) == pytest.approx([3 / 8 * math.log(100 / 60) / math.log(100 / 20), 0.0])


LOADS = st.builds(
    EngineReport,
    st.builds(
        KvLoad, st.integers(100, 10**7), st.integers(10, 10**5), st.floats(0, 1), st.integers(0, 500),
        st.floats(0, 1e6), st.just(0),
    ),
    st.lists(st.floats(0, 1e5), max_size=20).map(attempts),
    st.integers(0, 40),
)  # fmt: skip


@given(
    most=st.integers(1, 2000),
    ended=st.lists(st.floats(0, 1e5)),
    reports=st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | LOADS, min_size=1)),
    shape=st.builds(TurnShape, st.floats(0, 100), st.floats(0, 1000)),
)
def test_the_limit_is_between_one_and_the_upper_bound(
    most: int, ended: list[float], reports: list[dict[str, EngineReport | None]], shape: TurnShape
) -> None:
    control = AdmissionControl(most, follows=True)
    for second, one in enumerate(reports):
        for attempt in attempts(ended):
            control.ended(attempt, second - 0.5)
        control.report(one, float(second), shape)
        for number in (0, 1, most):
            assert 1 <= control.limit(number) <= most


def test_as_many_groups_are_leased_as_there_is_room_for() -> None:
    room = 0
    intake = GroupIntake("Environment-0", Sampling(), 0, group_size=8, max_samples=32, room=lambda: room)
    for room, found in ((0, [1, 2, 4]), (-7, [1, 2, 4]), (-8, [0, 1, 4]), (9, [3, 4, 4]), (1000, [4, 4, 4])):  # noqa: B007
        assert [intake.max_groups(num_held) for num_held in (0, 1, 4)] == found


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

        tasks = [asyncio.create_task(attempt(priority)) for priority in (5, 9, 7, 0, 7)]
        await asyncio.sleep(0.5)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.num_under_way == 0
        return entered

    assert run_virtually(scenario()) == [5, 0, 7, 9]


def test_nobody_waits_longer_than_an_attempt_may_take() -> None:
    async def scenario() -> float:
        gate = AttemptGate(AdmissionControl(2, follows=True), patience_s=30.0)
        engines = EnginePool(ScriptedEngine().generate, 1e9)

        async def attempt() -> None:
            async with gate.place():
                await asyncio.sleep(1000)

        tasks = [asyncio.create_task(attempt()) for _ in range(3)]
        while gate.num_under_way < 2:
            await asyncio.sleep(1)
            gate.report({"a": KvLoad(1000, 1000, 1.0, 1, 0.0, 0)}, engines)
        waited = asyncio.get_running_loop().time()
        for one in tasks:
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
        self._num_sampled = self._num_added = self._num_continued = self._num_here = 0

    async def run(self, *, follows: bool) -> tuple[float, int]:
        """Tokens a second, and the number of preemptions. `follows`: the limit follows the engines."""
        self._pool = EnginePool(self._ask, 1e9, asyncio.get_running_loop().time)
        self._pool.update(self._engines)
        tasks, group = set[asyncio.Task[None]](), 0
        for _ in range(int(self._work.seconds)):
            if follows:
                sampled = max(1, self._num_sampled)
                shape = TurnShape(self._num_added / sampled, self._num_continued / sampled)
                loads = {name: engine.kv_load() for name, engine in self._engines.items()}
                self._gate.report(loads, self._pool, shape)
            for _ in range(20):
                while self._num_here - self._gate.num_under_way < 2 * self._work.group_size:
                    for index in range(self._work.group_size):
                        self._num_here += 1
                        tasks.add(task := asyncio.create_task(self._attempt(group, index)))
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

    async def _attempt(self, group: int, index: int) -> None:
        work, key = self._work, f"{group}/{index}"
        async with self._gate.place(group) as place:
            place.conversation = asyncio.current_task()
            ids, known = prompt(group, work.num_prompt), 0
            for number, (length, wait_s) in enumerate(work.turns(group, draws(key))):
                sampling = Sampling(max_tokens=length, seed=100 * number + index, priority=group)
                completion = await self._pool.sample(ids, sampling, place.conversation)
                self._num_sampled += length
                self._num_continued += known
                self._num_added += len(ids) - known if known else 0
                ids = [*ids, *completion.token_ids]
                known = len(ids)
                await asyncio.sleep(wait_s)
                ids += prompt(f"{key}/{number}", work.num_result)
        self._num_here -= 1


def simulated(work: Workload, fixed: int | None = None) -> tuple[float, int]:
    control = AdmissionControl(1024, follows=True) if fixed is None else AdmissionControl(fixed)
    return run_virtually(Simulation(work, control).run(follows=fixed is None))


def check(work: Workload) -> None:
    rate, preempted = simulated(work)
    today, preempted_today = simulated(work, 1024)
    best = max(today, *(simulated(work, number)[0] for number in work.best), 0.0)
    assert rate >= 0.95 * best
    assert preempted_today < 100 or preempted <= 0.05 * preempted_today


@pytest.mark.parametrize("name", ["short and long answers", "a heavy tail"])
def test_admission_is_as_fast_as_the_best_number_and_seldom_preempts(name: str) -> None:
    check(WORKLOADS[name])


@pytest.mark.soak("test_admission_is_as_fast_as_the_best_number_and_seldom_preempts")
@pytest.mark.parametrize("name", ["shared long prefixes", "slow tools", "many engines"])
def test_so_it_is_with_shared_prefixes_with_tools_and_on_many_engines(name: str) -> None:
    check(WORKLOADS[name])
