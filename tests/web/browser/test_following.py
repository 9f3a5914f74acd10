"""The page follows a run as it grows, to its end, and says when nobody tells it any more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_lock import lock
from milescli.core.events import PhaseStarted, RunEnded
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_it_follows_a_run_to_its_end(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 60)
    run.tell(PhaseStarted(phase="start", detail="1 trainer ranks"), every_s=1.0)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open()
        assert "No step is done yet" in told.text()
        run.tell(PhaseStarted(phase="train", detail="steps 1 to 40"), every_s=1.0)
        run.steps(1, 2, reward=0.25)
        page.wait_for_selector("#main :text('of 40 steps')")
        run.steps(3, 40, reward=0.75)
        page.wait_for_selector("#head :text('step 40 of 40')")
        told.until("document.querySelector('#main .big').textContent === '0.75'")
        run.tell(RunEnded(outcome="done", step=40, seconds=320.0))
        page.wait_for_selector("#head .pill.done")
        page.wait_for_selector("#side .dot.done")


def test_a_run_that_begins_later_shows_up(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with served(folder=folder) as url:
        told = tab(url)
        told.page.goto(url)
        told.page.wait_for_selector("#main h2:text-is('No run yet')")
        run = WrittenRun(path=folder / "late-1")
        run.steps(1, 2)
        told.page.wait_for_selector("#side :text('late-1')")
        told.page.wait_for_selector("#main :text('of 40 steps')")


def test_it_tells_of_a_run_that_is_silent(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "silent-1", at_s=time.time() - 7200)
    run.attempt()
    run.tell(PhaseStarted(phase="train", detail="steps 1 to 40"))
    run.steps(1, 3)
    with lock(run.run), served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open()
        page.wait_for_selector("#head .pill.running")
        assert "has written nothing for" in told.text("#banner")
        assert "left" in told.text("#head")
        run.at_s = time.time() - 1
        run.steps(4, 4)
        told.until("document.querySelector('#banner').textContent === ''")


def test_it_says_when_the_server_is_gone(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "left-1")
    run.steps(1, 3)
    told = tab("")
    with served(folder=run.path.parent) as url:
        told.url = url
        page = told.open()
        shown = told.text("#main")
    page.wait_for_selector("#banner :text('is lost')")
    assert told.text("#main") == shown  # what it told last stays
    page.keyboard.press("2")
    page.wait_for_selector("#main [role=alert] :text('Try again')")


def test_a_finding_leads_to_its_curves(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "flat-1")
    run.steps(1, 40, reward=0.0)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open()
        finding = page.locator(".finding").first
        assert not finding.locator("details p").is_visible()
        finding.locator("summary").click()
        assert finding.locator("details p").is_visible()
        finding.get_by_role("link", name="Show the curves").click()
        page.wait_for_selector("#main > section[aria-label='Curves']")
        told.settle()
        assert page.locator(".chart").count() >= 1


def test_the_windows_of_a_fork_begin_where_it_began(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "fork-1")
    run.steps(101, 103)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        told.open()
        text = told.text()
        assert "After 103 steps · reward: first step → last step" in text
        assert "mean of the last 3 steps" in text
