"""Words with several values are the runs of a sweep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.sweep import points_of


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    points = points_of(["recipe=arithmetic", "trainer.optimizer.lr=1e-4,3e-4", "seed=range(1,4)"])
    assert [point.name for point in points] == [
        "lr-1e-4_seed-1", "lr-1e-4_seed-2", "lr-1e-4_seed-3",
        "lr-3e-4_seed-1", "lr-3e-4_seed-2", "lr-3e-4_seed-3",
    ]  # fmt: skip
    assert points[4].words == ("recipe=arithmetic", "trainer.optimizer.lr=3e-4", "seed=2")
    assert points[4].values == {"trainer.optimizer.lr": "3e-4", "seed": "2"}
    assert points[4].setting == (("trainer.optimizer.lr", "3e-4"),)


def test_keys_are_as_short_as_they_can_be_told_apart() -> None:
    (first, *_) = points_of(["trainer.optimizer.lr=1,2", "critic.optimizer.lr=3,4", "max_staleness=0,1"])
    assert first.name == "trainer.optimizer.lr-1_critic.optimizer.lr-3_max_staleness-0"


def test_values_that_make_no_names_do_not_make_two_runs_one() -> None:
    points = points_of(["reward.function=a/x.py:f,b/x.py:f", "data.path='one file.jsonl','one-file.jsonl'"])
    assert len({point.name for point in points}) == 4
    assert all("/" not in point.name and " " not in point.name for point in points)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=arithmetic"], "nothing is swept"),
        (["seed=1,1"], "seed=1,1: a value is there twice"),
        (["seed=interval(0,1)"], "List the values"),
        (["seed=range(0,200)", "trainer.max_steps=range(1,201)"], "40,000 runs"),
        (["name=a,b"], "a sweep sets name"),
        (["resume=auto", "seed=1,2"], "a sweep sets resume"),
    ],
)
def test_words_that_make_no_sweep_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        points_of(words)


def test_values_are_given_to_the_runs_as_they_are_written() -> None:
    points = points_of(["tracking.group=2e90114,3e90114", "data.path=choice('a, b.jsonl',1e3)", "seed=1"])
    assert [point.words[1:] for point in points] == [
        (f"tracking.group={group}", f"data.path={path}")
        for group in ("2e90114", "3e90114") for path in ("'a, b.jsonl'", "1e3")
    ]  # fmt: skip


def test_lists_and_texts_are_one_value() -> None:
    points = points_of(["rollout.sampling.stop=[a,b]", "data.prompt=Solve: {prompt}, please", "seed=1,2"])
    assert [point.values for point in points] == [{"seed": "1"}, {"seed": "2"}]
    assert points[0].words[:2] == ("rollout.sampling.stop=[a,b]", "data.prompt=Solve: {prompt}, please")


@given(
    st.dictionaries(
        st.sampled_from(["a", "b.c", "b.d", "seed"]), st.sets(st.integers(-3, 9), min_size=2, max_size=4), min_size=1
    )
)
def test_there_are_as_many_runs_as_combinations(swept: dict[str, set[int]]) -> None:
    points = points_of([f"{key}={','.join(map(str, sorted(values)))}" for key, values in swept.items()])
    expected = 1
    for values in swept.values():
        expected *= len(values)
    assert len({point.name for point in points}) == len({tuple(point.words) for point in points}) == expected
