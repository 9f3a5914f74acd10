"""What is on the page while a run grows below it: new figures, other processes, the focus, a
search that takes its time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.events import EvalDone
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SLOW_SEARCH = """
const ask = window.fetch;
window.fetch = async (url, options) => {
  const found = await ask(url, options);
  if (String(url).includes("q=slow")) await new Promise((done, end) => {
    setTimeout(done, 1500);
    options.signal.addEventListener("abort", () => end(options.signal.reason));
  });
  return found;
};
"""

HELD_LINES = """
const ask = window.fetch;
window.fetch = async (url, options) => {
  const found = await ask(url, options);
  while (window.isHeld && String(url).includes("/columns"))
    await new Promise((done) => setTimeout(done, 20));
  return found;
};
"""


def test_a_figure_that_comes_later_can_be_chosen(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 600)
    run.steps(1, 3)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        told.page.add_init_script(HELD_LINES)
        page = told.open("run=growing-1&page=curves")
        page.evaluate("window.isHeld = true")  # the list knows it before curves come
        name = page.locator("[id='column-eval/accuracy']")
        assert not name.count()
        run.tell(
            EvalDone(
                step=3,
                accuracy=0.5,
                num_prompts=4,
                truncated_fraction=0.0,
                response_tokens_mean=9.0,
                seconds=1.0,
                path="",
            )
        )
        run.steps(4, 4)
        name.wait_for()
        page.evaluate("window.isHeld = false")
        page.wait_for_selector(".charts :text('eval/accuracy')")


def test_the_largest_processes_are_named_as_they_are_now(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 600)
    memory = run.attempt() / "memory.jsonl"
    run.steps(1, 3)

    def remember(at_s: float, **sizes: int) -> None:
        with memory.open("a", encoding="utf-8") as file:
            ids = {str(number): size for number, size in enumerate(sizes.values())}
            names = {str(number): name for number, name in enumerate(sizes)}
            line = {"time": at_s, "resident_bytes": ids, "names": names}
            file.write(json.dumps(line) + "\n")

    small = {f"engine-{number}": 2**20 * (20 + number) for number in range(7)}
    remember(run.at_s, **small)
    remember(run.at_s + 10, **small)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open("run=growing-1&page=memory")
        assert "engine-0" not in told.text(".legend")
        remember(run.at_s + 20, **{**small, "engine-0": 2**30})
        run.steps(4, 4)
        page.wait_for_selector(".legend :text('engine-0')")


def test_the_newest_search_is_the_one_that_is_shown(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "searched-1")
    run.steps(1, 1)
    run.keep(1, {"response": "slow"}, {"response": "quick"})
    with served(folder=run.path.parent) as url:
        told = tab(url)
        told.page.add_init_script(SLOW_SEARCH)
        page = told.open("run=searched-1&page=samples")
        for text in ("slow", "quick"):
            page.fill("#sample-search", text)
            page.click("button:text-is('All steps')")
        page.wait_for_selector(".found :text('with “quick”')")
        page.wait_for_timeout(2000)
        assert "with “quick”" in told.text(".found")
        page.fill("#sample-search", "slow")
        page.click("button:text-is('All steps')")
        page.keyboard.press("Escape")
        page.wait_for_timeout(2000)
        assert not page.locator(".found").count()


def test_the_focus_stays_while_an_overview_grows(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 600)
    run.steps(1, 2)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open("run=growing-1")
        page.focus("summary:text-is('What these words mean')")
        run.steps(3, 3)
        told.until("document.querySelector('#main .big .of').parentNode.textContent[0] === '3'")
        assert page.evaluate("document.activeElement.textContent") == "What these words mean"
