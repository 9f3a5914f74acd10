"""What the page does when the server refuses, is slow, or cannot be reached for a while."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener
from tests.web.written import WrittenRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RUN = "run=quickstart-1"
BUSY = '{"what": "too much is asked at once", "why": "a test says so", "fix": "try again"}'
FILLED = {
    "curves": ("**/columns?*", ".chart"),
    "evaluations": ("**/evaluations", "[aria-label='During the run']"),
    "time": ("**/timeline*", "canvas.lanes"),
}
"""Page -> what is refused once, and what is there when it is not."""
SLOW = """
const ask = window.fetch;
window.fetch = async (url, options) => {
  if (String(url).includes("/columns")) {
    await new Promise((done, end) => {
      setTimeout(done, 2500);
      options.signal.addEventListener("abort", () => end(options.signal.reason));
    });
  }
  return ask(url, options);
};
"""
"""Columns take longer than the page waits between two looks at what is new."""


def refuse(page: Page, pattern: str) -> None:
    """Every such question, until `page.unroute`."""
    page.route(pattern, lambda route: route.fulfill(status=503, body=BUSY))


@pytest.mark.parametrize("name", FILLED)
def test_what_was_refused_is_shown_after_trying_again(url: str, tab: Opener, name: str) -> None:
    pattern, content = FILLED[name]
    told = tab(url)
    page = told.open(f"{RUN}&page={name}")
    assert page.locator(content).count()
    told.may_be_refused = True
    refuse(page, pattern)
    told.go(f"{RUN}&page=recipe")
    told.go(f"{RUN}&page={name}")
    assert "too much is asked at once" in told.text("#main [role=alert]")
    page.unroute(pattern)
    page.click("button:text-is('Try again')")
    page.wait_for_selector(content)
    assert not page.locator("#main [role=alert]").count()


def test_steps_that_make_no_sense_give_way_to_others(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=time&first=3")
    told.may_be_refused = True
    told.go(f"{RUN}&page=time&first=-1")
    page.wait_for_selector("#main [role=alert] :text('-1')")
    told.go(f"{RUN}&page=time&first=2")
    page.wait_for_selector("canvas.lanes")


def test_another_question_that_fails_leaves_no_old_answer(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=1")
    page.route("**/samples?*", lambda route: route.abort())
    told.go(f"{RUN}&page=samples&step=12")
    page.wait_for_selector("#main [role=alert] :text('does not answer')")
    assert not page.locator(".sample").count()


def test_news_do_not_end_a_slow_answer(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "slow-1", at_s=time.time() - 600)
    run.steps(1, 2)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        told.page.add_init_script(SLOW)
        told.page.goto(f"{url}#page=curves")
        step = 3
        while not told.page.locator(".chart").count():
            assert step < 40, "news ended each answer before it came"
            run.steps(step, step)
            step += 1
            time.sleep(0.5)
