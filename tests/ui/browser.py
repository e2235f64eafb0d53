"""Chromium for tests and benchmarks of the page, and what a page must not do in it."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

CHROMIUM = "chromium"
"""Command in PATH that `requirements/debian.sh` looks for."""
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
PATIENCE_MS = 120_000
"""Deadline of what a page must show. Machines of continuous integration are slow at odd moments."""
WIDE, PHONE = (1280, 800), (390, 844)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. The thread must run no event loop: Playwright has one of its own here until the block is left."""
    program = shutil.which(CHROMIUM)
    if program is None:
        pytest.fail(f"the page is tested in {CHROMIUM}, which is not in PATH: `make test` installs it", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Witness:
    """What a page did that it must not: each as a line. Lifecycle: made before the page opens anything."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        page.on("console", lambda said: self._heard(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", self._failed)
        page.on("request", self._asked)

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left
            self.complaints.append(f"failed: {request.url}: {request.failure}")

    def _asked(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "file", "blob") and url.hostname != "127.0.0.1":
            self.complaints.append(f"asked another host: {request.url}")


@contextlib.contextmanager
def visit(
    browser: Browser, size: tuple[int, int] = WIDE, scheme: str = "light", refusal: int | None = None
) -> Iterator[Page]:
    """A page in a profile of its own, that must not complain. `scheme`: light, dark. `refusal`: the status of an answer
    that it is to get; Chromium itself writes such a line into the console."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        witness = Witness(page)
        yield page
        assert not [complaint for complaint in witness.complaints if f"status of {refusal} " not in complaint]
    finally:
        context.close()


def until(page: Page, expression: str) -> None:
    """Wait until it is true. Playwright's own way has the page evaluate text, which its policy forbids."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {PATIENCE_MS} ms: {expression}"
        page.wait_for_timeout(20)
