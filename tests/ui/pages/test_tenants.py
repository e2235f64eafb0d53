"""The tenants of a server: what each has used, what its clients wait for."""

import shutil
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.browser import visit
from tests.ui.made_runs import HERE, make_run
from tests.ui.told import write_serving

pytestmark = pytest.mark.real


def test_line_of_a_server_leads_to_its_tenants(browser: Browser, place: Path, address: str) -> None:
    server = make_run(place / "served", "start", holder=HERE)
    write_serving(server)
    with visit(browser) as page:
        page.goto(address)
        page.get_by_role("link", name="served").click()
        expect(page.locator("tr[data-tenant=alice] td")).to_have_text(
            ["alice", "2", "1 of 16", "1", "5", "0", "7", "9", "2 s", "–", "4,780", "2,790", "36 s", "3", "any"]
        )
        expect(page.locator("tr[data-tenant=bob]")).to_contain_text("paused for 1 min 10 s")
        expect(page.locator("tr[data-client='one:train:0']")).to_contain_text("request 152 is being carried out")
        expect(page.locator("nav.tabs a")).to_have_text(["Tenants", "Logs", "Events"])
    shutil.rmtree(server)


def test_silence_of_a_server_is_told(browser: Browser, place: Path, address: str) -> None:
    server = make_run(place / "silent", "start", holder=HERE)
    write_serving(server, time=time.time() - 300)
    with visit(browser) as page:
        page.goto(f"{address}/#/tenants/silent")
        expect(page.locator(".notice")).to_contain_text("told nothing for 5 min")
    shutil.rmtree(server)
