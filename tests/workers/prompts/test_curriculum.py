"""Rows are taken by the outcomes of their level, and the same ones whatever is resumed or dies meanwhile."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.data import CurriculumConfig, DataConfig, EvaluationConfig, PhaseConfig
from penstock.conf.errors import DataError
from penstock.store.client.store_client import StoreClient
from penstock.store.ledger.outcomes import Outcome
from penstock.store.service.store import Store
from penstock.workers.agents.environment import Task
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.order import Curriculum, CurriculumState, Level, PromptCursor, chance, level_of, phase_of
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from tests.amounts import amount
from tests.store.driver import make_spec
from tests.store.players import STAGES, train, values_of
from tests.workers.prompts.test_source import Characters, make_config

LEVELS = ("solved", "middle", "hopeless")
PER_STEP = 2
SPEC = make_spec(keeps_outcomes=True)
LAG = SPEC.max_active_groups - PER_STEP
Run = tuple[Store, PromptSource, "list[list[int]]"]


def row_of(level: str, index: int = 0) -> DatasetRow:
    return DatasetRow("1+1", "2", index, f"row {index}", extra={"level": level, "about": {"kind": level}})


def draw(curriculum: Curriculum, level: str, count: int, outcome: Outcome) -> None:
    """Draw groups of a level, and hear of them."""
    for _ in range(count):
        curriculum.begin()
        curriculum.drew(row_of(level))
    curriculum.hear([outcome] * count)


def taken_share(curriculum: Curriculum, level: str) -> float:
    curriculum.begin()
    return sum(curriculum.takes(row_of(level), PromptCursor(0, place), True) for place in range(4000)) / 4000


def test_solved_and_hopeless_levels_are_taken_at_the_floor_and_the_best_always() -> None:
    curriculum = Curriculum(CurriculumConfig(by="level", floor=0.1), 0, groups_per_step=8, lag=0)
    assert [taken_share(curriculum, level) for level in LEVELS] == [1.0, 1.0, 1.0]
    for level, outcome in zip(LEVELS, ((1.0, 0.0), (0.6, 0.4), (0.0, 0.0)), strict=True):
        draw(curriculum, level, 8, outcome)
    draw(curriculum, "harder", 8, (0.1, 0.2))
    shares = [taken_share(curriculum, level) for level in (*LEVELS, "harder", "new")]
    assert shares == pytest.approx([0.1, 1.0, 0.1, 0.5, 1.0], abs=0.03)
    stats = curriculum.stats()
    assert stats["curriculum/weight/harder"] == pytest.approx(0.5)
    assert stats["curriculum/reward/middle"] == pytest.approx(0.6)


def test_levels_of_which_none_teaches_are_taken_alike() -> None:
    curriculum = Curriculum(CurriculumConfig(by="level"), 0, groups_per_step=8, lag=0)
    for level in LEVELS:
        draw(curriculum, level, 8, (0.0, 0.0))
    assert [taken_share(curriculum, level) for level in LEVELS] == [1.0, 1.0, 1.0]


def test_outcomes_of_the_last_steps_that_may_be_under_way_do_not_count() -> None:
    curriculum = Curriculum(CurriculumConfig(by="level"), 0, groups_per_step=4, lag=8)
    assert [list(curriculum.missing(group)) for group in (0, 11, 12, 15, 16)] == [
        [], [], list(range(4)), list(range(4)), list(range(8)),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_a_levels_numbers_are_the_mean_of_few_groups_and_move_with_many(outcomes: list[Outcome]) -> None:
    level = Level()
    for outcome in outcomes:
        level = level.after(outcome, memory=8)
    assert level.num_groups == len(outcomes)
    if len(outcomes) <= 8:
        assert level.spread == pytest.approx(sum(spread for _, spread in outcomes) / len(outcomes))
    assert min(mean for mean, _ in outcomes) - 1e-9 <= level.mean <= max(mean for mean, _ in outcomes) + 1e-9


@given(st.integers(0, 2**40), st.integers(0, 99), st.integers(0, 10**6))
def test_chances_are_fixed_and_below_one(seed: int, epoch: int, position: int) -> None:
    cursor = PromptCursor(epoch, position)
    assert 0.0 <= chance(seed, cursor) < 1.0
    assert chance(seed, cursor) == chance(seed, PromptCursor(epoch, position))


def test_levels_are_columns_fields_rows_or_fields_of_what_reasoning_gym_says() -> None:
    problem = {"environment": "sums", "entry": {"metadata": {"num_terms": 3}}}
    assert level_of(row_of("easy"), "level") == level_of(row_of("easy"), "about.kind") == "easy"
    assert level_of(row_of("easy", 7), "row") == "7"
    assert level_of(DatasetRow("", "", 0, "", extra=problem), "num_terms") == "3"
    game = DatasetRow("", None, 3, "", extra=Task("g3", 3, {"size": 5}).as_columns())
    assert level_of(game, "size") == "5"
    with pytest.raises(DataError, match=r"row 0: no value of 'lvel', which data\.curriculum\.by names.*level"):
        level_of(row_of("easy"), "lvel")


def test_phases_follow_one_another_and_then_all_levels_come() -> None:
    phases = {"one": PhaseConfig(["easy"], 2), "two": PhaseConfig(["easy", "hard"], 1), "rest": PhaseConfig()}
    config = CurriculumConfig(by="level", phases=phases)
    assert [list(phase_of(config, step)) for step in range(4)] == [["easy"], ["easy"], ["easy", "hard"], []]
    curriculum = Curriculum(config, 0, groups_per_step=1, lag=0)
    assert (taken_share(curriculum, "easy"), taken_share(curriculum, "hard")) == (1.0, 0.0)


# Sources and a real store.


def write_rows(tmp_path: Path, num_rows: int = 12) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}+{n}", "answer": "1", "level": LEVELS[n % 3]} for n in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(
    path: Path, start: PromptStart | None = None, heard: Sequence[Outcome] = (), **chosen: Any
) -> PromptSource:
    """`heard`: outcomes of the first groups."""
    start = start or PromptStart()
    config = make_config(path)
    data = DataConfig(path=str(path), curriculum=CurriculumConfig(**{"by": "level", "memory": 4, **chosen}))
    encoder = PromptEncoder(Characters(), config.data, TokenLimits.of_run(config, with_responses=False))
    state = start.curriculum or CurriculumState(start.first_group)
    curriculum = Curriculum(data.curriculum, 0, PER_STEP, LAG, state)
    curriculum.hear(heard)
    return PromptSource(open_dataset(data, EvaluationConfig()), encoder, start, curriculum=curriculum)


def reward_of(task: str, row: int) -> float:
    level = json.loads(task)["level"]
    return {"solved": 1.0, "hopeless": 0.0, "middle": float(row % 2)}[level]


async def consume(client: StoreClient, steps: range, taken: list[list[int]]) -> None:
    for step in steps:
        for stage in STAGES:
            num_rows = 0
            while num_rows < 2 * PER_STEP:
                most = 2 * PER_STEP - num_rows if stage in ("reward", "reference") else PER_STEP
                lease = await client.lease(stage, most, "worker")
                assert lease is not None
                num_rows += len(lease.rows)
                values = values_of(stage, lease, step)
                if stage == "rollout":
                    taken += [ids.tolist() for ids in lease.rows.arrays("prompt_ids")[::2]]
                if stage == "reward":
                    tasks = zip(lease.rows.strings("task"), lease.rows.row_ids.tolist(), strict=True)
                    values = {"reward": [reward_of(task, row) for task, row in tasks]}
                await client.write(lease, lease.rows.row_ids, values)
        await train(client, step)
        await client.served(step + 1)


def undisturbed(path: Path, num_steps: int, **chosen: Any) -> list[list[int]]:
    taken: list[list[int]] = []

    async def main() -> None:
        store = Store(SPEC)
        running = asyncio.create_task(source_of(path, **chosen).run(StoreClient(store), PER_STEP))
        await asyncio.wait_for(consume(StoreClient(store), range(num_steps), taken), 30)
        running.cancel()

    asyncio.run(main())
    return taken


@pytest.mark.parametrize("by", ["level", "row"])
def test_what_teaches_is_drawn_most(tmp_path: Path, by: str) -> None:
    taken = undisturbed(write_rows(tmp_path), 60, by=by)
    texts = ["".join(map(chr, ids[1:])) for ids in taken[40:]]
    counts = [sum(int(text.split("+")[0]) % 3 == number for text in texts) for number in range(3)]
    assert counts[1] > 2 * (counts[0] + counts[2])
    assert counts[0] + counts[2] > 0


@pytest.mark.parametrize("by", ["level", "row"])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(4)))
def test_sources_that_are_ended_at_any_moment_draw_what_one_would(tmp_path: Path, by: str, seed: int) -> None:
    path, dice, taken = write_rows(tmp_path), random.Random(seed), list[list[int]]()

    async def replaced(store: Store) -> None:
        while True:
            client = StoreClient(store)
            running = asyncio.create_task(source_of(path, by=by).run(client, PER_STEP))
            for _ in range(dice.randrange(60)):
                await asyncio.sleep(0)
            running.cancel()
            if dice.random() < 0.5:
                await client.leave()

    async def main() -> None:
        store = Store(SPEC)
        replacing = asyncio.create_task(replaced(store))
        await asyncio.wait_for(consume(StoreClient(store), range(20), taken), 30)
        replacing.cancel()

    asyncio.run(main())
    assert taken == undisturbed(path, 20, by=by)[: len(taken)]


@pytest.mark.parametrize("by", ["level", "row"])
@pytest.mark.parametrize("step", [1, 3, 8, 15])
def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(tmp_path: Path, by: str, step: int) -> None:
    path, taken = write_rows(tmp_path), list[list[int]]()

    async def first() -> tuple[str, int, dict[str, Any]]:
        store, source = Store(SPEC), source_of(path, by=by)
        client = StoreClient(store)
        running = asyncio.create_task(source.run(StoreClient(store), PER_STEP))
        await asyncio.wait_for(consume(client, range(step), taken), 30)
        admitted = await client.cut()
        start = source.start_after(admitted)
        saved = await client.snapshot(str(tmp_path / "saved"), step)
        running.cancel()
        return saved, admitted, asdict(start)

    saved, admitted, values = asyncio.run(first())
    values = json.loads(json.dumps(values))
    state = CurriculumState.from_dict(values["curriculum"])
    start = PromptStart(PromptCursor.from_dict(values["cursor"]), admitted, state)

    async def second() -> None:
        store = Store(SPEC, restore=saved)
        running = asyncio.create_task(source_of(path, start, by=by).run(StoreClient(store), PER_STEP))
        await asyncio.wait_for(consume(StoreClient(store), range(step, 20), taken), 30)
        running.cancel()

    asyncio.run(second())
    assert taken == undisturbed(path, 20, by=by)


def test_it_goes_back_to_any_group_it_has_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was restored in the place of another: what was heard stays known."""
    monkeypatch.setattr("penstock.workers.prompts.order.REMEMBERED_STATES", 5)
    dice = random.Random(0)
    source = source_of(write_rows(tmp_path), heard=[(0.5, float(dice.random() < 0.5)) for _ in range(60)])
    whole = source.next_groups(60)
    for _ in range(30):
        number = dice.randrange(60)
        source.go_to(number)
        assert source.next_groups(60 - number) == whole[number:]


def test_a_phase_of_which_no_row_is_left_is_refused(tmp_path: Path) -> None:
    source = source_of(write_rows(tmp_path), phases={"only": PhaseConfig(["5"])})
    with pytest.raises(DataError, match=r"none of the 12 rows is of the levels that this phase draws \(5\)"):
        source.next_groups(1)
