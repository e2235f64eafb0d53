"""Several runs in one page: in the same charts, seeds together, and in what they differ."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.ui.browser import until

pytestmark = pytest.mark.real

SWEEP = "#/compare/sweep%2Fa,sweep%2Fb,sweep%2Fc"
REWARD = "document.querySelector('#chart-reward').chart"


def curves(page: Page) -> dict[str, dict[str, Any]]:
    """Curves of the chart of the reward, by label."""
    found = page.evaluate(f"{REWARD}.curves")
    return {curve["label"]: curve for curve in found}


def opened(page: Page, address: str) -> None:
    page.goto(f"{address}/{SWEEP}")
    expect(page.locator("#chart-reward canvas")).to_be_visible()


def test_differing_settings_of_runs_are_a_table(page: Page, address: str) -> None:
    opened(page, address)
    rows = {row[0]: row[1:] for row in (text.split("\t") for text in page.locator("tbody tr").all_inner_texts())}
    assert rows["seed"] == ["1", "2", "3"]
    assert rows["learning.rate"] == ["1", "1", "2"]
    assert rows["state"] == ["finished"] * 3
    assert "trainer.max_steps" not in rows


def test_seeds_of_a_setting_are_one_curve_with_their_range(page: Page, address: str) -> None:
    opened(page, address)
    found = curves(page)
    assert set(found) == {"rate 1", "rate 2"}
    both = found["rate 1"]  # rewards of one seed are 0.2 above the other's
    assert both["mean"][4] == pytest.approx(0.15)
    assert (both["low"][4], both["high"][4]) == pytest.approx((0.05, 0.25))
    assert found["rate 2"]["mean"][4] == pytest.approx(0.55)


def test_seeds_are_shown_one_by_one_when_they_are_asked_for(page: Page, address: str) -> None:
    opened(page, address)
    page.get_by_label("seeds of a setting as one curve").uncheck()
    until(page, f"{REWARD}.curves.length === 3")
    found = curves(page)
    assert {label: curve["mean"][0] for label, curve in found.items()} == pytest.approx(
        {"a": 0.01, "b": 0.21, "c": 0.51}
    )
    assert len({curve["color"] for curve in found.values()}) == 3
