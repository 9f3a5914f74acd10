"""A walk through all pages over a real run, by mouse and by keyboard: what a reader asks is
answered there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from milescli.core.events import AdapterEvent
from milescli.web.endpoints import MAX_LIMIT
from tests.fake_run import WrittenRun, step_done
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "Overview": "Where the time of a step goes",
    "Curves": "rollout/reward_mean",
    "Samples": "Prompt",
    "Time": "Timeline",
    "Memory": "What the plan expects",
    "Evaluations": "During the run",
    "Recipe & plan": "What the plan decided, and why",
    "Logs": "lines",
    "All runs": "quickstart-2",
    "Chat": "miles ui --control",
    "Rewards": "miles rewards try quickstart-1",
}
"""Tab -> what is to be read on its page."""
RUN = "run=quickstart-1"


def test_overview_says_first_whether_it_is_learning(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(RUN)
    first = page.locator("#main section.card").first
    assert first.get_attribute("aria-label") == "Verdict"
    assert "learning" in first.inner_text()
    text = told.text()
    assert "99.5 %" in text  # held-out accuracy of this run at its end
    for word in ("rollout", "train", "tokens/s", "restarts", "mean of the last 5 steps", "greedy"):
        assert word in text


def test_every_page_is_reached_by_mouse(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(RUN)
    for title, content in PAGES.items():
        page.click(f"#pages a:text-is('{title}')")
        page.wait_for_selector(f"#main > section[aria-label='{title}']")
        told.shows(content)
        assert page.title().startswith(title)


def test_every_page_is_reached_by_keys(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(RUN)
    for number, (title, content) in reversed([*enumerate(PAGES.items(), 1)]):
        page.keyboard.press("-" if number == 11 else str(number % 10))
        page.wait_for_selector(f"#main > section[aria-label='{title}']")
        told.shows(content)
    page.keyboard.press("?")
    assert page.locator("dialog").get_by_text("next step").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_first_tab_stop_leads_to_the_content(url: str, tab: Opener) -> None:
    page = tab(url).open(RUN)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert "page=" not in page.url or RUN in page.url


def test_what_it_said_at_step_12_is_found_by_keys(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=11")
    page.keyboard.press("j")
    told.until("location.hash.includes('step=12')")
    told.until("document.querySelector('#step-number').value === '12'")
    told.settle()
    before = told.text(".prompt .text")
    page.keyboard.press("n")
    told.until("location.hash.includes('group=')")
    assert told.text(".prompt .text") != before
    page.keyboard.press("k")
    told.until("location.hash.includes('step=11')")


def test_the_address_holds_the_whole_view(url: str, tab: Opener) -> None:
    first = tab(url)
    page = first.open(f"{RUN}&page=samples&step=12")
    page.keyboard.press("n")
    page.click("button:text-is('Loss mask')")
    first.until("location.hash.includes('colour=mask')")
    first.settle()
    second = tab(url)
    second.open(page.url.partition("#")[2])
    assert second.text(".prompt .text") == first.text(".prompt .text")
    pressed = second.page.locator("button:text-is('Loss mask')").get_attribute("aria-pressed")
    assert pressed == "true"


def test_tokens_tell_of_themselves(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=12")
    page.hover(".token.heat0, .token.heat1")
    assert re.search(
        r"token \d+: .* log-prob -?[\de.-]+ .* trainer .* version", told.text(".readout")
    )
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert told.text(".readout").startswith("token 0")
    page.click("#colour-difference")
    page.wait_for_selector(".token[class*=cold]")


def test_only_wrong_samples_are_shown_when_asked_for(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=1")
    page.click("button:text-is('Only wrong')")
    told.until("location.hash.includes('only=wrong')")
    rewards = page.locator(".sample .pill").all_inner_texts()
    assert rewards
    assert not [text for text in rewards if text.startswith("✓")]


def test_a_text_is_found_among_all_steps(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=12")
    wanted = page.inner_text(".prompt .text").strip()
    page.fill("#sample-search", wanted)
    page.click("button:text-is('All steps')")
    page.wait_for_selector(".found a")
    assert "step 12, prompt" in told.text(".found")
    page.keyboard.press("Escape")
    told.until("!document.querySelector('.found')")


def test_what_is_searched_for_is_marked_over_several_tokens(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=2")
    page.fill("#sample-search", "9+8=17")
    page.keyboard.press("Enter")
    page.wait_for_selector(".sample mark")
    marked = page.locator(".sample .tokens").first.locator("mark").all_inner_texts()
    assert "".join(marked) == "9+8=17"
    assert not page.locator(".found").count()  # Enter searches this step alone


def test_a_step_is_typed_and_what_was_kept_of_it_is_said(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=samples&step=2")
    page.fill("#step-number", "12")
    told.until("location.hash.includes('step=12')")
    told.settle()
    assert page.get_attribute("#step-slider", "aria-valuetext") == "step 12"
    assert re.search(r"4 of 32 groups were kept", told.text(".groups"))
    least = page.locator(".sample button.link").first
    assert re.search(r"[\d.]+ %", least.inner_text())
    least.click()
    assert "log-prob" in told.text(".readout")
    token, readout = (page.locator(one).first.bounding_box() for one in (".cursor", ".readout"))
    assert token is not None
    assert readout is not None
    assert abs(readout["y"] - token["y"]) < 120  # beside it


def test_steps_of_the_timeline_stay_while_they_are_typed(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=time")
    # as a browser's own buttons beside a number do: without the focus
    page.evaluate("document.querySelector('#timeline-first').value = '7'")
    told.go(f"{RUN}&page=time&level=warning")
    assert page.input_value("#timeline-first") == "7"
    page.fill("#timeline-last", "9")
    page.dispatch_event("#timeline-first", "input")
    told.until("location.hash.includes('first=7') && location.hash.includes('last=9')")
    told.settle()
    page.click("summary:text-is('As a table')")
    page.wait_for_selector("[aria-label=Intervals]")
    cells = "[...document.querySelectorAll('[aria-label=Intervals] tbody td:nth-child(3)')]"
    # the table is filled when the server has replied
    told.until(f"!{cells}.some((cell) => cell.textContent === '10')")
    steps = page.locator("[aria-label=Intervals] tbody td:nth-child(3)").all_inner_texts()
    assert {"7", "8", "9"} <= set(steps)


def test_the_whole_run_begins_with_its_start(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=time")
    words = told.text("[aria-label='The whole run']").split()
    assert words[words.index("warm-up") + 1] == "78"
    page.click("button:text-is('Whole run')")
    told.until("location.hash.includes('first=0')")
    told.settle()
    page.click("summary:text-is('As a table')")
    page.wait_for_selector("[aria-label=Intervals]")
    first = page.locator("[aria-label=Intervals] tbody tr").first.inner_text().split()
    assert first[:2] == ["run", "start"]


def test_a_double_click_marks_no_step(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=curves&columns=train/loss,eval/accuracy")
    page.dblclick(".chart .u-over")
    page.wait_for_timeout(600)
    assert "step=" not in page.url
    page.click(".chart .u-over")
    told.until("location.hash.includes('step=')")


def test_curves_zoom_by_drag_and_return_by_double_click(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=curves&columns=rollout/reward_mean,train/loss")
    assert page.locator(".chart").count() == 2
    box = page.locator(".chart .u-over").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=5)
    page.mouse.up()
    told.until("location.hash.includes('from=')")
    told.settle()
    page.dblclick(".chart .u-over")
    told.until("!location.hash.includes('from=')")


def test_curves_lead_to_the_samples_of_a_step(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=curves")
    page.keyboard.press("k")
    told.until("location.hash.includes('step=')")
    page.click(".step-link a")
    page.wait_for_selector("#main > section[aria-label='Samples']")
    told.settle()
    assert "Sample 1" in told.text()


def test_older_notices_are_shown_up_to_what_the_server_gives(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(RUN)
    limits, buttons = page.evaluate("""async () => {
      const { NoticeList } = await import("./static/notice_list.js");
      const limits = [];
      const ask = async (name, { limit }) => {
        limits.push(limit);
        const one = { text: "", level: "info", time_s: 0 };
        return { total: 9000, notices: Array(Math.min(limit, 9000)).fill(one) };
      };
      const root = document.createElement("div");
      const list = new NoticeList(root, { ask });
      const buttons = [];
      for (list.more of [23, 25]) {
        await list.loaded.refresh();
        buttons.push(root.querySelectorAll("button").length);
      }
      return [limits, buttons];
    }""")
    assert max(limits) == MAX_LIMIT and buttons == [1, 0]


def test_the_layout_of_a_run_on_rows_has_no_engines(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(RUN)
    batch = {"prompts_per_step": 32, "num_samples": 64, "of_rows": True}
    plan = {"trainer": {"tp": 1, "dp": 2}, "engines": {"num": 0, "tp": 1}, "batch": batch}
    plan |= {"slots": [{"device": 0, "trainer_rank": 0}], "colocated": True, "max_staleness": 0}
    words = page.evaluate(
        "plan => import('./static/layout.js').then(m => m.layout(plan)[0].textContent)", plan
    )
    assert "placement trainer alone" in words and "batch 32 rows" in words
    assert "staleness" not in words and "engines" not in words


def test_figures_are_chosen_by_search(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=curves")
    page.keyboard.press("/")
    page.keyboard.type("clip fraction")
    labels = [one for one in page.locator(".column").all() if one.is_visible()]
    assert len(labels) == 1
    labels[0].click()
    page.wait_for_selector(".chart[aria-label='train/clip_fraction']")


def test_two_runs_lie_over_each_other(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=curves")
    page.check(".run:not(.current) input")
    told.until("location.hash.includes('with=')")
    told.until("document.querySelectorAll('.chart .legend li').length >= 2")
    told.settle()
    legend = told.text(".chart .legend")
    assert "quickstart-1" in legend
    assert "quickstart-2" in legend


def test_samples_of_an_evaluation_are_read_in_parts(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=evaluations")
    page.click("a[aria-label='Samples of step 0']")
    page.wait_for_selector(".evaluated li")
    assert page.locator(".evaluated li").count() == 20
    page.click("button:text-is('Next')")
    told.until("document.querySelectorAll('.evaluated li').length === 5")
    assert "21 to 25 of 25" in told.text()
    page.click("button:text-is('Only right')")
    told.until(
        "[...document.querySelectorAll('.evaluated .pill')].every((one) => "
        "one.textContent.startsWith('✓'))"
    )
    assert page.locator(".evaluated li").count() > 0


def test_logs_show_lines_that_fit(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=logs&file=engine-0-server.log")
    page.fill("#log-search", "server")
    page.wait_for_selector(".log mark")
    lines = page.locator(".log li").all_inner_texts()
    assert all("server" in line.lower() for line in lines)


@pytest.mark.parametrize("page_name", ["samples", "evaluations"])
def test_a_theme_is_kept_over_pages(url: str, tab: Opener, page_name: str) -> None:
    page = tab(url).open(RUN)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.goto(page.url.partition("#")[0] + f"#{RUN}&page={page_name}")
    page.reload()
    page.wait_for_selector("#main > section")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_adapters_of_a_run_have_pages_of_their_own(
    tmp_path: Path, browser: Browser, tab: Opener
) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "many-1")
    for step in range(1, 4):
        run.tell(AdapterEvent(adapter="left", event=step_done(step, reward=0.125)))
        run.tell(AdapterEvent(adapter="right", event=step_done(step, reward=0.875)))
    for name in ("left", "right"):
        folder = run.run.adapters_dir / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("name: tiny\n", encoding="utf-8")
    with served(folder=run.path.parent) as url:
        told = tab(url)
        page = told.open()
        told.settle()
        for name in ("overview", "curves"):
            told.go(f"run=many-1&page={name}")
            page.click("#main [aria-label=Adapters] a:text-is('left')")
            told.until("location.hash.includes('many-1%3Aleft')")
            told.settle()
        told.go("run=many-1")
        page.click("#side .adapters a:text-is('right')")
        told.until("document.querySelector('#main .big')?.textContent === '0.875'")
        page.click("#side .adapters a:text-is('left')")
        told.until("document.querySelector('#main .big')?.textContent === '0.125'")
