import pytest

from penstock.orchestrator.observability.cards import elapsed


@pytest.mark.parametrize(("seconds", "text"), [(None, "0:00"), (7.9, "0:07"), (750, "12:30"), (3723, "1:02:03")])
def test_seconds_are_told_as_a_clock_does(seconds: float | None, text: str) -> None:
    assert elapsed(seconds) == text
