"""Logs that grow, that begin, or that are changed for others while they are read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FIRST_SEEN = """
() => {
  const { top } = document.querySelector(".log").getBoundingClientRect();
  return [...document.querySelectorAll(".log li")].find((line) =>
    line.getBoundingClientRect().bottom > top + 1).dataset.number;
}
"""


def lines(first: int, last: int) -> str:
    """Numbered ones."""
    return "".join(f"line {number}\n" for number in range(first, last + 1))


def below(page: Page) -> float:
    """Pixels below what is seen of a log."""
    return page.evaluate(
        "() => { const log = document.querySelector('.log');"
        " return log.scrollHeight - log.scrollTop - log.clientHeight }"
    )


def test_what_is_read_stays_while_a_log_grows(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "long-1", at_s=time.time() - 60)
    folder = run.attempt(engine_0=lines(1, 600), engine_1=lines(1, 300))
    run.steps(1, 2)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open("page=logs&file=engine-0.log")
        assert below(page) < 2
        page.evaluate("document.querySelector('.log').scrollTop = 4000")
        first = page.evaluate(FIRST_SEEN)
        with (folder / "engine-0.log").open("a", encoding="utf-8") as file:
            file.write(lines(601, 650))
        run.steps(3, 3)
        told.until("document.querySelector('#main [role=status]').textContent.includes('of 650')")
        assert page.evaluate(FIRST_SEEN) == first
        page.get_by_role("button", name="Show older lines").evaluate("button => button.click()")
        told.until("document.querySelectorAll('.log li').length === 650")
        assert page.evaluate(FIRST_SEEN) == first
        page.select_option("#log-file", "engine-1.log")
        told.until("document.querySelectorAll('.log li').length === 300")
        assert below(page) < 2


def test_an_attempt_without_a_log_yet(tmp_path: Path, browser: Browser, tab: Opener) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "young-1", at_s=time.time() - 60)
    folder = run.attempt()
    run.steps(1, 1)
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open("run=young-1&page=logs")
        told.go("run=young-1&page=logs&wrap=0")
        assert "No logs yet" in told.text()
        (folder / "engine-0.log").write_text("it began\n", encoding="utf-8")
        run.steps(2, 2)
        page.wait_for_selector(".log :text('it began')")
