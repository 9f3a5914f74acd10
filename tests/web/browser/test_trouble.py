"""What the page does when the server refuses, is slow, or cannot be reached for a while."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from milescli.checkpoint.run_lock import lock
from milescli.platform.ports import free_ports
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

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
            assert step < 600, "news ended each answer before it came"
            run.steps(step, step)
            step += 1
            time.sleep(0.5)


def test_a_server_with_another_key_is_told_of(
    tmp_path: Path, browser: Browser, tab: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "left-1")
    run.steps(1, 3)
    told = tab("")
    [port] = free_ports(1)
    with served(folder=run.path.parent, port=port) as url:
        told.url = url
        page = told.open()
        shown = told.text("#main")
    told.may_be_refused = True
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where another key is kept
    with served(folder=run.path.parent, port=port):
        page.wait_for_selector("#banner :text('this page needs its key')")
        assert told.text("#main") == shown


def test_a_refused_stream_is_no_lost_connection(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "crowded-1", at_s=time.time() - 60)
    run.steps(1, 2)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        told.may_be_refused = True
        refuse(told.page, "**/live")
        page = told.open()
        with page.expect_response("**/live"):
            pass  # it asks for its stream again and again
        assert told.text("#banner") == ""
        run.steps(3, 3)
        page.wait_for_selector("#head :text('step 3 of 40')")


def test_a_run_that_is_not_there_is_said_to_be_so(url: str, tab: Opener) -> None:
    told = tab(url)
    told.may_be_refused = True
    page = told.open("run=nobody-1")
    with page.expect_response("**/live"):
        pass
    assert "there is no run nobody-1" in told.text("#main [role=alert]")
    assert told.text("#banner") == ""


def test_the_page_stays_at_a_run_while_others_go_on(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    folder = tmp_path / "runs"
    left = WrittenRun(path=folder / "left-1", at_s=time.time() - 100)
    right = WrittenRun(path=folder / "right-1", at_s=time.time() - 60)
    for run in (left, right):
        run.attempt()
        run.steps(1, 1)
    with lock(left.run), lock(right.run), served(folder=folder) as url:
        told = tab(url)
        page = told.open()
        shown, other = (right, left) if told.text("#head h1") == "right-1" else (left, right)
        assert f"run={shown.path.name}" in page.url
        other.at_s = time.time()
        other.steps(2, 3)
        page.wait_for_selector(f"#run-{other.path.name} :text('step 3/40')")
        assert told.text("#head h1") == shown.path.name


def test_the_list_of_runs_is_said_to_be_open(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 60)
    run.steps(1, 2)
    with served(folder=run.path.parent) as url:
        told = tab(url, width=375)
        page = told.open()
        page.keyboard.press("m")
        run.steps(3, 3)
        page.wait_for_selector("#head :text('step 3 of 40')")
        assert page.get_attribute("#menu", "aria-expanded") == "true"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "menu"
