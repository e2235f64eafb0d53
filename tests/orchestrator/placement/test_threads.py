"""Who gets which share of the machine."""

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.placement.threads import threads_per_worker


def config_of(max_staleness: int, num_engines: int, num_ranks: int) -> RunConfig:
    config = RunConfig(max_staleness=max_staleness)
    config.rollout.num_workers, config.trainer.num_ranks = num_engines, num_ranks
    return config


@pytest.mark.parametrize(
    ("max_staleness", "num_engines", "num_ranks", "of_engine", "of_rank"),
    [
        (0, 1, 1, 8, 8),
        (0, 2, 1, 4, 8),  # the trainer has the machine to itself while it trains
        (0, 1, 4, 8, 2),
        (1, 1, 1, 4, 4),
        (1, 2, 1, 2, 2),
        (1, 30, 30, 1, 1),
        (0, 30, 1, 1, 8),
    ],
)
def test_those_that_take_turns_divide_the_cores_among_their_own_kind_only(
    max_staleness: int, num_engines: int, num_ranks: int, of_engine: int, of_rank: int
) -> None:
    config = config_of(max_staleness, num_engines, num_ranks)
    assert threads_per_worker("rollout", config, 8) == of_engine
    assert threads_per_worker("trainer", config, 8) == of_rank
    assert threads_per_worker("scorer", config, 8) == of_rank


def test_a_number_that_was_asked_for_is_given() -> None:
    config = config_of(0, 2, 1)
    config.rollout.num_threads, config.trainer.num_threads = 3, 5
    assert [threads_per_worker(role, config, 8) for role in ("rollout", "trainer")] == [3, 5]
