"""Spans by lane, few enough to be kept."""

from penstock.orchestrator.observability.monitoring.step_trace import FINE, lanes_of, with_waits
from penstock.orchestrator.run_directory.timeline import Span, Work, Worked


def test_a_lane_of_a_role_stands_for_all_of_its_members() -> None:
    lanes = lanes_of([Span("engines", "evaluate", 1.0, 2.0)], [], {"engines": ["Rollout-0", "Rollout-1"]})
    assert {lane: [(span.name, span.start, span.end) for span in spans] for lane, spans in lanes.items()} == {
        "Rollout-0": [("evaluate", 1.0, 2.0)],
        "Rollout-1": [("evaluate", 1.0, 2.0)],
    }


def test_an_engine_has_a_span_a_group_and_a_reward_one_for_what_it_did_in_a_row() -> None:
    work = [
        Work("rollout", "Rollout-0", 1, 0.0, 1.0, 4),
        Work("rollout", "Rollout-0", 2, 0.0, 3.0, 4),
        Work("reward", "Reward-0", 1, 1.0, 1.1, 4),
        Work("reward", "Reward-0", 2, 1.1, 1.2, 2),
        Work("reward", "Reward-0", 2, 3.0, 3.1, 2),
    ]
    lanes = lanes_of([], work, {})
    assert [(span.start, span.end, span.details) for span in lanes["Rollout-0"]] == [
        (0.0, 1.0, {"group": 1, "groups": 1, "rows": 4}),
        (0.0, 3.0, {"group": 2, "groups": 1, "rows": 4}),
    ]
    assert [(span.start, span.end, span.details) for span in lanes["Reward-0"]] == [
        (1.0, 1.2, {"rows": 6}),
        (3.0, 3.1, {"rows": 2}),
    ]


def test_very_many_groups_of_an_engine_are_as_many_spans_as_can_be_told_apart() -> None:
    work = [Work("rollout", "Rollout-0", number, 0.0, 1.0 + number / 10_000) for number in range(10_000)]
    spans = lanes_of([], work, {})["Rollout-0"]
    assert len(spans) <= FINE
    assert sum(span.details["groups"] for span in spans) == 10_000
    assert max(span.end for span in spans) == 1.9999


def test_times_of_a_machine_whose_clock_differs_are_moved_to_this_one() -> None:
    told = {
        "now": 1000.0,
        "leases": [["rollout", "Rollout-0", 3, 990.0, 999.0, 8]],
        "admitted": [[3, 989.0]],
        "missed": 0,
    }
    near, far = Worked.of(told, 1000.1), Worked.of(told, 1060.0)
    assert (near.work[0].end, near.admitted[3]) == (999.0, 989.0)  # the answer took a moment
    assert (far.work[0].end, far.admitted[3]) == (1059.0, 1049.0)


def test_who_does_nothing_for_long_waits_for_what_comes_before() -> None:
    spans = [Span("Rollout-0", "rollout", -1.0, 2.0), Span("Rollout-0", "load weights", 6.0, 7.0)]
    lanes = with_waits(
        {"Rollout-0": spans, "checkpoint": []}, 0.0, 10.0, {"Rollout-0": "prompts", "Reward-0": "rollout"}
    )
    assert {lane: [(span.name, span.start, span.end) for span in found] for lane, found in lanes.items()} == {
        "Reward-0": [("wait for rollout", 0.0, 10.0)],
        "Rollout-0": [
            ("rollout", -1.0, 2.0),
            ("wait for prompts", 2.0, 6.0),
            ("load weights", 6.0, 7.0),
            ("wait for prompts", 7.0, 10.0),
        ],
        "checkpoint": [],
    }
