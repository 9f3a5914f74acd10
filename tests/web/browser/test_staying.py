"""What a reader does on the page stays while the page looks for what is new: what is typed, pointed
at, scrolled, opened or selected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from milescli.checkpoint.run_control import write_note
from milescli.checkpoint.run_lock import lock
from milescli.core.events import RunEnded
from tests.fake_run import WrittenRun
from tests.waiting import until
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener, Tab

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

HELD_SAMPLES = """
const ask = window.fetch;
window.asked = 0;
window.fetch = async (url, options) => {
  if (String(url).includes("/samples?")) {
    window.asked += 1;
    while (window.isHeld) {
      options.signal.throwIfAborted();
      await new Promise((done) => setTimeout(done, 20));
    }
  }
  return ask(url, options);
};
"""
MARK = "(selector) => { document.querySelector(selector).isMarked = true }"
"""An element that is drawn anew has lost its mark."""
PICTURES = "[...document.querySelectorAll('#main canvas')].map((one) => one.toDataURL())"


@pytest.fixture
def growing(tmp_path: Path) -> WrittenRun:
    """A run with three steps."""
    run = WrittenRun(path=tmp_path / "runs" / "growing-1", at_s=time.time() - 600)
    run.steps(1, 3)
    return run


@pytest.fixture(scope="module")
def controlled(browser: Browser, runs: Path) -> Iterator[str]:
    """URL of a page that may start commands."""
    with served(folder=runs, words=["--control"]) as url:
        yield url


def is_marked(page: Page, selector: str) -> bool:
    """True if it is still the element of before."""
    return bool(page.evaluate(f"document.querySelector('{selector}').isMarked"))


def look_again(told: Tab, run: WrittenRun) -> None:
    """Let the page find another list of runs, without an event of a run."""
    told.page.evaluate(MARK, "#side h2")
    write_note(run.run, f"seen at {time.monotonic()}")
    told.page.clock.fast_forward(3000)
    told.until("!document.querySelector('#side h2').isMarked")
    told.settle()


def test_ticks_and_colours_leave_what_is_typed_on_a_page(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    page = told.open("run=quickstart-1&page=chat")
    for name, field in (("chat", "#chat-step"), ("rewards", "#reward-name")):
        told.go(f"run=quickstart-1&page={name}")
        page.fill(field, "12")
        page.click("#with-quickstart-2")
        page.click("#theme-button")
        told.settle()
        assert page.input_value(field) == "12"


@pytest.mark.parametrize("name", ["curves", "time", "memory", "evaluations"])
def test_pictures_take_other_colours_where_they_are(url: str, tab: Opener, name: str) -> None:
    told = tab(url)
    page = told.open(f"run=quickstart-1&page={name}")
    told.until("document.querySelectorAll('#main canvas').length > 0")
    page.evaluate(MARK, "#main > section")
    before = page.evaluate(PICTURES)
    page.keyboard.press("t")
    told.until(f"{PICTURES}.every((one, at) => one !== {before}[at])")
    assert is_marked(page, "#main > section")


def test_looks_for_news_do_not_end_a_slow_answer(
    growing: WrittenRun, browser: Browser, tab: Opener
) -> None:
    for step in (1, 2):
        growing.keep(step, {})
    with served(folder=growing.path.parent) as url:
        told = tab(url)
        page = told.page
        page.clock.install()
        page.add_init_script(f"window.isHeld = true; {HELD_SAMPLES}")
        page.goto(f"{url}#run=growing-1&page=samples")
        told.until("window.asked === 1")
        for mode in ("mask", "version"):  # each lets the page look at what it shows
            page.click(f"#colour-{mode}")
            page.clock.fast_forward(1000)
        page.evaluate("window.isHeld = false")
        page.wait_for_selector(".sample")
        assert page.evaluate("window.asked") == 1
        page.evaluate("window.isHeld = true")
        growing.keep(3, {})
        growing.steps(4, 4)
        told.until("window.asked === 2")
        page.click("#colour-mask")
        page.clock.fast_forward(1000)
        page.evaluate("window.isHeld = false")
        told.until("document.querySelector('#step-number').value === '3'")
        told.settle()
        assert page.evaluate("window.asked") == 2


def test_how_long_ago_a_run_wrote_stays_true(
    growing: WrittenRun, browser: Browser, tab: Opener
) -> None:
    growing.at_s = time.time() - 2
    growing.tell(RunEnded(outcome="done", step=3, seconds=9.0), every_s=0.0)
    with served(folder=growing.path.parent) as url:
        told = tab(url)
        told.page.clock.install()
        page = told.open("run=growing-1&page=runs")
        assert "last wrote" in told.text("#head")
        page.clock.fast_forward("06:00:00")
        for place in ("#head", "#main tbody"):
            told.until(f"document.querySelector('{place}').textContent.includes('6 h ago')")


def test_tabs_tables_and_lists_stay_where_nothing_changed(
    growing: WrittenRun, browser: Browser, tab: Opener
) -> None:
    growing.attempt(engine_0="one line\n")
    with served(folder=growing.path.parent) as url:
        told = tab(url, width=375)
        told.page.clock.install()
        page = told.open("run=growing-1&page=recipe")
        page.evaluate("document.querySelector('#pages').scrollLeft = 9999")
        scrolled = page.evaluate("document.querySelector('#pages').scrollLeft")
        page.evaluate(MARK, "#main table.recipe")
        look_again(told, growing)
        assert is_marked(page, "#main table.recipe")
        assert page.evaluate("document.querySelector('#pages').scrollLeft") == scrolled > 100
        told.go("run=growing-1&page=logs")
        page.wait_for_selector(".log li")
        page.evaluate(MARK, ".log li")
        growing.steps(4, 4)  # the log has nothing new
        page.wait_for_selector("#head :text('step 4 of 40')")
        told.settle()
        assert is_marked(page, ".log li")
        told.go("run=growing-1&page=runs")
        page.focus("#run-state")
        page.evaluate(MARK, "#run-state option")
        growing.tell(RunEnded(outcome="done", step=4, seconds=9.0))
        page.wait_for_selector("#main .pill.done")
        assert is_marked(page, "#run-state option")
        page.select_option("#run-state", "")
        page.focus("#run-search")
        look_again(told, growing)
        assert page.locator("#run-state option").all_inner_texts() == ["All states", "done (1)"]


def test_the_state_that_is_filtered_by_follows_the_address(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open("run=quickstart-1&page=runs")
    page.focus("#run-state")
    told.go("run=quickstart-1&page=runs&only=failed")
    assert page.input_value("#run-state") == "failed"
    told.go("run=quickstart-1&page=runs")
    assert page.input_value("#run-state") == ""


def test_the_figures_under_the_pointer_stay(
    growing: WrittenRun, browser: Browser, tab: Opener
) -> None:
    with served(folder=growing.path.parent) as url:
        told = tab(url)
        told.page.clock.install()
        page = told.open("run=growing-1&page=curves&columns=rollout/reward_mean")
        growing.steps(4, 4, reward=0.875)
        told.until("document.querySelector('.legend b').textContent === '0.875'")
        page.hover(".chart .u-over", position={"x": 5, "y": 20})
        told.until("document.querySelector('.legend b').textContent === '0.5'")
        assert "Step 1 " in told.text(".step-link")
        look_again(told, growing)
        assert told.text(".legend") == "0.5" and "Step 1 " in told.text(".step-link")
        growing.steps(5, 5, reward=0.75)
        page.wait_for_selector("#head :text('step 5 of 40')")
        told.until("document.querySelector('.plot').ariaLabel.includes('to 0.75')")
        assert told.text(".legend") == "0.5" and "Step 1 " in told.text(".step-link")


def test_the_focus_stays_above_the_curves(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open("run=quickstart-1&page=curves")
    page.focus("button:text-is('Log y')")
    page.keyboard.press("Enter")
    told.until("location.hash.includes('log=1')")
    assert page.evaluate("document.activeElement.textContent") == "Log y"
    page.keyboard.press("Space")
    told.until("!location.hash.includes('log=1')")


def test_the_slider_above_the_curves_is_dragged_on(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open("run=quickstart-1&page=curves")
    box = page.locator("#smooth").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 5, middle)
    page.mouse.down()
    for share in (0.3, 0.6, 0.9):
        page.mouse.move(box["x"] + share * box["width"], middle)
        told.until(f"Number(new URLSearchParams(location.hash).get('smooth')) > {share - 0.15}")
    page.mouse.up()


def test_keys_do_nothing_behind_a_window(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    page = told.open("run=quickstart-1&page=curves&from=3&to=9")
    before = page.url
    page.click("#launch-button")
    page.focus("dialog.control button:text-is('Cancel')")
    for key in ("2", "]", "t", "Escape"):
        page.keyboard.press(key)
    told.until("document.querySelector('dialog.control') === null")
    assert page.url == before
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_a_command_that_runs_is_read_while_it_goes_on(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    job = {"id": 1, "command": "miles launch quickstart", "exit_code": None}
    job["output"] = "".join(f"line {number}\n" for number in range(200))
    failures = list[str]()

    def answer(route: Route) -> None:
        if job.get("is_lost"):
            failures.append(route.request.url)
            route.abort()
        else:
            route.fulfill(json=job)

    told.page.route("**/api/control/launch", answer)
    told.page.route("**/api/control/jobs/1", answer)
    page = told.open("run=quickstart-1&page=recipe")
    page.click("#launch-button")
    page.click("dialog .main-button")
    page.wait_for_selector("dialog pre:has-text('line 199')")
    below = "(([one]) => one.scrollHeight - one.scrollTop - one.clientHeight)"
    assert page.evaluate(f"{below}(document.querySelectorAll('dialog pre'))") < 2
    page.evaluate("document.querySelector('dialog pre').scrollTop = 500")
    page.focus("dialog pre")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('dialog pre'))")
    selected = page.evaluate("String(getSelection())")
    job["output"] += "more\n"
    page.wait_for_selector("dialog pre:has-text('more')")
    assert page.evaluate("document.querySelector('dialog pre').scrollTop") == 500
    assert page.evaluate("document.activeElement.localName") == "pre"
    assert selected and selected in page.evaluate("String(getSelection())")
    job["is_lost"] = True
    until(lambda: page.evaluate("1") and failures, "a request that fails")
    job.update(is_lost=False, exit_code=1)
    page.wait_for_selector("dialog :text('exit code 1')")


def test_a_command_that_the_server_forgot_is_said_to_be_so(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    told.may_be_refused = True
    told.page.route("**/api/control/launch", lambda route: route.fulfill(json={"id": 9999}))
    page = told.open("run=quickstart-1&page=recipe")
    page.click("#launch-button")
    page.click("dialog .main-button")
    page.wait_for_selector("dialog [role=alert] :text('there is no command 9999')")


def test_an_engine_that_starts_after_its_page_was_left_is_ended(
    controlled: str, tab: Opener
) -> None:
    told = tab(controlled)
    held: list[Route] = []
    told.page.route("**/chat", lambda route: held.append(route))
    told.page.route("**/chats/7/end", lambda route: route.fulfill(json={}))
    page = told.open("run=quickstart-1&page=chat")
    page.click("#chat-start")
    until(lambda: page.evaluate("1") and held, "the request for a chat")
    told.go("run=quickstart-1&page=recipe")
    with page.expect_request("**/chats/7/end"):
        held[0].fulfill(json={"id": 7, "said": []})
    assert len(held) == 1  # no engine for the second model


def test_logs_and_memory_of_a_running_run_grow_between_its_events(
    growing: WrittenRun, browser: Browser, tab: Opener
) -> None:
    folder = growing.attempt(engine_0="it began\n")
    sizes = '{{"time": {}, "resident_bytes": {{"1": {}}}, "names": {{"1": "engine-0"}}}}\n'
    (folder / "memory.jsonl").write_text(sizes.format(growing.at_s, 2**20))
    with lock(growing.run), served(folder=growing.path.parent) as url:
        told = tab(url)
        told.page.clock.install()
        page = told.open("run=growing-1&page=logs&file=engine-0.log")
        page.wait_for_selector(".log :text('it began')")
        with (folder / "engine-0.log").open("a", encoding="utf-8") as file:
            file.write("it goes on\n")
        page.clock.fast_forward(3000)
        page.wait_for_selector(".log :text('it goes on')")
        told.go("run=growing-1&page=memory")
        assert "1 GiB" not in told.text()
        with (folder / "memory.jsonl").open("a", encoding="utf-8") as file:
            file.write(sizes.format(growing.at_s + 10, 2**30))
        page.clock.fast_forward(3000)
        page.wait_for_selector("#main td:text('1 GiB')")
