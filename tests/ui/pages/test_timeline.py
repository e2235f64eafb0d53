"""The timeline of a run: who was busy when, what each step waited for."""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import visit
from tests.ui.made_runs import append
from tests.ui.pages.conftest import make_live
from tests.ui.told import NUM_STEPS, step_line, write_timeline

pytestmark = pytest.mark.real

LANES = ["Critical path", "Rollout-0", "Rollout-1", "Reward-0", "Trainer-policy-0"]


def opened(page: Page, address: str, query: str = "") -> None:
    page.goto(f"{address}/#/timeline/done{query}")
    expect(page.locator(".lanes rect").first).to_be_visible()


def shown(page: Page) -> list[str]:
    return page.locator(".steps button").all_inner_texts()


def test_each_step_says_where_its_time_went_and_each_actor_has_a_lane(page: Page, address: str) -> None:
    opened(page, address)
    assert shown(page) == [step_line(step)["text"] for step in range(NUM_STEPS - 2, NUM_STEPS + 1)]
    assert page.locator(".lanes .row:not(.axis) > b").all_inner_texts() == LANES
    assert page.locator(".lanes .legend span").all_inner_texts() == [
        "rollout", "reward", "update", "load weights", "waiting",
    ]  # fmt: skip


def test_spans_that_overlap_share_the_lane_and_say_what_they_are(page: Page, address: str) -> None:
    opened(page, address, "?step=3")
    assert shown(page) == [step_line(3)["text"]]
    lane = page.locator(".lanes .row").filter(has=page.get_by_text("Rollout-0", exact=True))
    boxes = [box for rect in lane.locator("rect[data-span=rollout]").all() if (box := rect.bounding_box())]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] + 1
    lane.locator("rect[data-span='load weights']").click()
    expect(page.locator(".chosen")).to_have_text("load weights: 300 ms (version 3)")


def test_steps_are_walked_by_keys_and_a_drag_zooms_in(page: Page, address: str) -> None:
    opened(page, address)
    page.keyboard.press("[")
    expect(page.locator(".steps button").first).to_contain_text(f"step {NUM_STEPS - 5} ")
    page.keyboard.press("l")
    expect(page.locator(".steps button").last).to_contain_text(f"step {NUM_STEPS} ")
    update = page.locator("rect[data-span=update]").first
    before = update.bounding_box()
    axis = page.locator(".lanes svg").first.bounding_box()
    assert before
    assert axis
    page.mouse.move(axis["x"] + 10, axis["y"] + 40)
    page.mouse.down()
    page.mouse.move(axis["x"] + 310, axis["y"] + 40)
    page.mouse.up()
    after = update.bounding_box()
    assert after
    assert after["width"] > 2 * before["width"]
    page.keyboard.press("r")
    again = update.bounding_box()
    assert again
    assert abs(again["width"] - before["width"]) < 1


def test_a_loss_is_marked_on_the_lane_of_who_was_lost(page: Page, address: str) -> None:
    opened(page, address, "?step=7")
    lane = page.locator(".lanes .row").filter(has=page.get_by_text("Rollout-1", exact=True))
    expect(lane.locator(".fault title")).to_have_text("fault of Rollout-1")
    assert page.locator(".fault").count() == 1


def test_a_run_that_goes_on_is_followed(browser: Browser, place: Path, address: str) -> None:
    run = make_live(place / "traced")
    write_timeline(run, 2)
    with visit(browser) as page:
        page.goto(f"{address}/#/timeline/traced")
        expect(page.locator(".steps button")).to_have_count(2)
        append(run / "spans.jsonl", step_line(3))
        append(run / "metrics.jsonl", {"step": 6})
        expect(page.locator(".steps button").last).to_contain_text("step 3 ")
    shutil.rmtree(run)


def test_a_run_without_a_timeline_says_so(page: Page, address: str) -> None:
    page.goto(f"{address}/#/timeline/failed")
    expect(page.locator(".steps")).to_have_text("No step has a timeline yet.")
