"""A browser, a run that was kept of a real `quickstart`, and the page over it. Without a Chromium
these tests are skipped, and say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import until
from tests.web.browser.chromium import FLAGS, NAMES, VARIABLE, chromium, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEPT = Path(__file__).parent / "kept"
"""Real runs of `quickstart`, without weights and with less of each log."""
WAIT_MS = 30_000
"""Longest for anything to show up, on a busy machine."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Of the tests of this folder alone: its event loop would be in the way of others."""
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium here: ${VARIABLE}, or one of {', '.join(NAMES)} on PATH")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install -r docker/requirements-dev.txt"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kept runs; tests only read it."""
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("kept") / "runs"))


@pytest.fixture(scope="package")
def url(browser: Browser, runs: Path) -> Iterator[str]:
    """Of the page over the kept runs, with its key."""
    with served(folder=runs) as url:
        yield url


@dataclass
class Tab:
    """A page that is open, and what went wrong in it."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)
    may_be_refused: bool = False
    """By a test that makes the server refuse something, which the browser then logs."""

    def open(self, fragment: str = "") -> Page:
        """Go there, with all figures drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#{fragment}")
        self.settle()
        return self.page

    def settle(self) -> None:
        """Wait until a page is drawn and nothing is being loaded."""
        self.page.wait_for_selector("#main > section")
        self.until("!document.querySelector('[aria-busy]') && !document.querySelector('#main > p')")

    def until(self, condition: str) -> None:
        """Wait for a condition in JavaScript. Asked from outside: the page forbids `eval`."""
        until(lambda: self.page.evaluate(condition), condition, within_s=WAIT_MS / 1000)

    def shows(self, text: str) -> None:
        """Wait until a reader sees it: a chart is drawn when it comes into view."""
        self.settle()
        self.until(f"document.querySelector('#main').innerText.includes({json.dumps(text)})")

    def go(self, fragment: str) -> Page:
        """To another view of the page that is open, as a link would."""
        self.page.evaluate("hash => { location.hash = hash }", fragment)
        self.settle()
        return self.page

    def text(self, selector: str = "#main") -> str:
        """What a reader sees there; what is out of view is drawn only when it comes into view."""
        self.page.locator(selector).first.scroll_into_view_if_needed()
        element = f"document.querySelector({json.dumps(selector)})"
        self.until(f"!{element}.textContent.trim() || {element}.innerText.trim()")
        return self.page.inner_text(selector)


def note(tab: Tab, kind: str, text: str) -> None:
    """That a server has gone is no fault of the page: some tests end it."""
    is_refused = tab.may_be_refused and text.startswith("Failed to load resource")
    if kind == "error" and "net::ERR_" not in text and not is_refused:
        tab.wrong.append(text)


Opener = Callable[..., Tab]


@pytest.fixture
def tab(browser: Browser) -> Iterator[Opener]:
    """Opens tabs: of a URL, a width and a colour scheme. Fails where a script failed, or where
    the page was forbidden something."""
    opened = []

    def open_tab(
        url: str, *, width: int = 1440, scheme: str = "light", bypass_csp: bool = False
    ) -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
            bypass_csp=bypass_csp,
        )
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        tab = Tab(page=page, url=url)
        page.on("pageerror", lambda error: tab.wrong.append(str(error)))
        page.on("console", lambda line: note(tab, line.type, line.text))
        opened.append((context, tab))
        return tab

    yield open_tab
    for context, tab in opened:
        context.close()
        assert not tab.wrong, tab.wrong
