"""Where a step's time went, by spans with times that can be added up by hand."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.step_trace import LEAST_S, WAIT, Segment, critical_path, sentence
from penstock.orchestrator.run_directory.timeline import Span, Work

RANK = "Trainer-policy-0"


def rank(wait: tuple[float, float], update: tuple[float, float]) -> list[Span]:
    return [Span(RANK, WAIT, *wait), Span(RANK, "update", *update)]


def told(path: list[Segment]) -> list[tuple[str, str, float, float]]:
    return [(segment.lane, segment.what, segment.start, segment.end) for segment in path]


def test_a_wait_for_the_batch_is_the_chain_of_its_last_group() -> None:
    work = [
        Work("rollout", "Rollout-0", 1, 0.0, 1.0),
        Work("reward", "Reward-0", 1, 1.0, 1.25),
        Work("rollout", "Rollout-1", 2, 0.25, 2.0),
        Work("reward", "Reward-0", 2, 2.25, 2.5),
        Work("rollout", "Rollout-0", 9, 0.0, 2.75),  # of another step's batch
    ]
    path = critical_path(0.0, 4.0, rank((0.0, 3.0), (3.0, 4.0)), [], work, {1: 0.0, 2: 0.0}, {1, 2})
    assert told(path) == [
        ("Rollout-1", "wait for Rollout-1 to take the group", 0.0, 0.25),
        ("Rollout-1", "rollout", 0.25, 2.0),
        ("Reward-0", "wait for Reward-0 to take the group", 2.0, 2.25),
        ("Reward-0", "reward", 2.25, 2.5),
        ("Controller", "wait for the batch to be formed", 2.5, 3.0),
        (RANK, "update", 3.0, 4.0),
    ]
    assert sentence(7, 4.0, path) == (
        "step 7 took 4.0 s: 1.8 s waiting for Rollout-1's last group (2), 1.0 s update, "
        "0.50 s wait for the batch to be formed"
    )


def test_time_before_the_group_was_admitted_is_a_wait_for_prompts() -> None:
    work = [Work("rollout", "Rollout-0", 5, 1.5, 2.0)]
    path = critical_path(0.0, 3.0, rank((0.0, 2.0), (2.0, 3.0)), [], work, {5: 1.0}, {5})
    assert told(path)[:3] == [
        ("Prompts", "wait for prompts to be admitted", 0.0, 1.0),
        ("Rollout-0", "wait for Rollout-0 to take the group", 1.0, 1.5),
        ("Rollout-0", "rollout", 1.5, 2.0),
    ]


def test_what_began_before_the_step_counts_from_its_start() -> None:
    work = [Work("rollout", "Rollout-0", 5, -8.0, 2.0)]
    path = critical_path(0.0, 3.0, rank((0.0, 2.0), (2.0, 3.0)), [], work, {5: -9.0}, {5})
    assert told(path) == [("Rollout-0", "rollout", 0.0, 2.0), (RANK, "update", 2.0, 3.0)]


def test_between_the_ranks_phases_the_controller_waits_for_others() -> None:
    others = [Span("engines", "load weights", 2.0, 2.5), Span("engines", "evaluate", 2.5, 3.5)]
    path = critical_path(0.0, 4.0, rank((0.0, 1.0), (1.0, 2.0)), others, [], {}, set())
    assert told(path) == [
        ("Controller", WAIT, 0.0, 1.0),
        (RANK, "update", 1.0, 2.0),
        ("engines", "load weights", 2.0, 2.5),
        ("engines", "evaluate", 2.5, 3.5),
        ("Controller", "between phases", 3.5, 4.0),
    ]


times = st.floats(0, 10)
works = st.lists(
    st.builds(Work, st.sampled_from(["rollout", "reward"]), st.sampled_from("ab"), st.integers(0, 3), times, times)
)


@given(works, st.dictionaries(st.integers(0, 3), times), st.lists(times, min_size=3, max_size=3))
def test_a_path_goes_through_the_step_once_without_overlap_or_gap(
    work: list[Work], admitted: dict[int, float], cuts: list[float]
) -> None:
    work = [one for one in work if one.start <= one.end]
    start, middle, end = sorted(cuts)
    path = critical_path(start, end, rank((start, middle), (middle, end)), [], work, admitted, {0, 1, 2, 3})
    at = start
    for segment in path:
        assert 0 <= segment.start - at < LEAST_S * (len(work) + 3) * 3
        at = segment.end
    assert end - at < LEAST_S * (len(work) + 3) * 3
