"""The cluster of a run: who is there and who waits for whom."""

import json
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import visit
from tests.ui.pages.conftest import make_live
from tests.ui.told import write_state

pytestmark = pytest.mark.real


def test_waits_between_actors_are_drawn_and_told(browser: Browser, place: Path, address: str) -> None:
    run = make_live(place / "waits")
    write_state(run)
    with visit(browser) as page:
        page.goto(f"{address}/#/cluster/waits")
        expect(page.locator(".graph")).to_be_visible()
        assert page.locator(".waits li").all_inner_texts() == [
            "Reward-0 waits for Rollout-1: 24 row(s) of rollout",
            "Trainer-policy-0 waits for Rollout-1: 24 row(s) of rollout",
        ]
        waiting = page.locator(".graph .box.waits text:not(.small)")
        assert waiting.all_text_contents() == ["Reward-0", "Trainer-policy-0"]
        assert page.locator(".graph .arrow").count() == 2
    shutil.rmtree(run)


def test_in_a_finished_run_nobody_is_shown_as_waiting(page: Page, address: str) -> None:
    page.goto(f"{address}/#/cluster/done")
    expect(page.locator(".graph")).to_be_visible()
    assert page.locator(".waits li").count() == 0
    assert page.locator(".graph .box.waits").count() == 0


def test_rows_leases_weights_and_actors_are_told(page: Page, address: str) -> None:
    page.goto(f"{address}/#/cluster/done")
    expect(page.locator("tr[data-stage=reward] td.number")).to_have_text(["24", "0", "0", "40", "0.020 s"])
    body = page.locator("body")
    expect(body).to_contain_text("The oldest, 128, lacks reward (8). Dropped: reward_error 3.")
    expect(body).to_contain_text("12.5 s")
    expect(page.locator(".stop.old")).to_have_text("Rollout-1version 4")
    expect(page.locator("tr[data-member=Reward-1]")).to_contain_text("does not answer")
    expect(page.locator("tr[data-member=Rollout-1]")).to_contain_text("alpha")


def test_a_store_that_does_not_answer_is_said_and_comes_again(browser: Browser, place: Path, address: str) -> None:
    run = make_live(place / "stated")
    with visit(browser) as page:
        page.goto(f"{address}/#/cluster/stated")
        expect(page.locator("body")).to_contain_text("has not started its actors yet")
        write_state(run)
        state = json.loads((run / "state.json").read_text())
        (run / "state.json").write_text(json.dumps(state | {"store": None, "waits": []}))
        expect(page.locator(".notice")).to_contain_text("The store did not answer")
        write_state(run)
        expect(page.locator("tr[data-stage=reward]")).to_be_visible()
    shutil.rmtree(run)
