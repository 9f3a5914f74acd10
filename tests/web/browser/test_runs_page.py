"""What a reader of many runs does: find one, see what ended it, hold it beside others, save what a
chart shows, and start or stop it where the page may."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.checkpoint.run_control import write_note
from milescli.checkpoint.run_dir import verdict_file
from milescli.core.events import PhaseStarted, RunEnded, WarmupStepDone
from tests.fake_run import WrittenRun, eval_done, report
from tests.waiting import until
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener
from tests.web.browser.test_accessibility import violations

NUM_RUNS = 40
HELD_RUNS = """
const ask = window.fetch;
window.asked = 0;
window.fetch = async (url, options) => {
  if (!String(url).endsWith("api/runs")) return ask(url, options);
  const found = await ask(url, options);
  window.asked += 1;
  while (window.isHeld) await new Promise((done) => setTimeout(done, 20));
  return found;
};
"""
"""An answer about all runs takes its time, and is old when it comes."""
ERROR = {"error": "trainer rank 0 died", "why": "the kernel ended it", "fix": ["miles resume bad"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs: some done, one that failed, one in its warm-up."""
    folder = tmp_path_factory.mktemp("many") / "runs"
    for number in range(NUM_RUNS):
        run = WrittenRun(path=folder / f"sweep-{number:02}")
        run.steps(1, 4, reward=number / NUM_RUNS)
        run.tell(eval_done(4, 0.9 - number / 100), RunEnded(outcome="done", step=4, seconds=9.0))
    write_note(WrittenRun(path=folder / "sweep-07").run, "twice the batch #keep")
    bad = WrittenRun(path=folder / "bad")
    log_dir = bad.attempt(trainer_rank_0="the last words\n")
    bad.tell(PhaseStarted(phase="start"), PhaseStarted(phase="warmup", detail="60 steps"))
    verdict_file(log_dir).write_text(json.dumps({"outcome": "failed", "step": 0, "error": ERROR}))
    (log_dir / "why.txt").write_text("bad failed at step 0\n")
    warm = WrittenRun(path=folder / "warm")
    warm.attempt(trainer_rank_0="\n")
    warm.tell(PhaseStarted(phase="start"), PhaseStarted(phase="warmup", detail="60 steps"))
    for step in range(1, 31):
        warm.tell(WarmupStepDone(step=step, num_steps=60, report=report(loss=6 / step), step_s=1.0))
    return folder


@pytest.fixture(scope="module")
def many(folder: Path) -> Iterator[str]:
    """The URL of a page that may start and stop runs; one of them is running."""
    run = WrittenRun(path=folder / "warm").run
    run.lock_file.write_text(f"elsewhere {os.getpid()}\n")
    import fcntl

    with open(run.lock_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(folder=folder, words=("--control",)) as url:
            yield url


def test_a_run_is_found_sorted_and_held_beside_the_baseline(many: str, tab: Opener) -> None:
    told = tab(many)
    page = told.open("run=sweep-03&page=runs")
    rows = page.locator("#main tbody tr")
    assert rows.count() == NUM_RUNS + 2
    assert page.locator("#main tbody tr").nth(29).bounding_box()["y"] < 900  # type: ignore[index]
    page.click("#sort-accuracy")
    told.until("document.querySelector('#main tbody th').textContent === 'sweep-00'")
    page.click("#sort-accuracy")
    told.until("document.querySelector('#main tbody th').textContent === 'sweep-39'")
    page.fill("#run-search", "#keep")
    told.until("document.querySelectorAll('#main tbody tr').length === 1")
    assert "twice the batch" in told.text("#main tbody")
    page.fill("#run-search", "sweep-0")
    told.until("document.querySelectorAll('#main tbody tr').length === 10")
    page.click("[aria-label='Baseline sweep-05']")
    told.until("document.querySelector('tr.base') !== null")
    row = page.locator("tr", has=page.locator("a:text-is('sweep-02')"))
    assert "+3.0 points" in row.inner_text() and "0.075" in row.inner_text()
    page.click("[aria-label='Show sweep-02 in the curves']")
    told.go("run=sweep-03&page=curves&base=sweep-05&with=sweep-02&columns=rollout/reward_mean")
    assert {"sweep-02", "sweep-03", "sweep-05"} <= set(told.text(".legend").split())
    told.go("run=sweep-03&page=runs&only=failed")
    assert page.locator("#main tbody th").all_inner_texts() == ["bad"]


def test_what_ended_a_run_comes_first(many: str, tab: Opener) -> None:
    told = tab(many)
    page = told.open("run=bad")
    first = page.locator("#main section.card").first
    text = first.inner_text()
    assert first.get_attribute("aria-label") == "What ended it"
    assert "trainer rank 0 died" in text and "the kernel ended it" in text
    assert "miles resume bad" in text and "the last words" in text
    assert "warmup" not in told.text("#head") and "Now" not in told.text()
    assert page.locator("#control-resume").count() == 1
    told.go("run=bad&page=logs")
    assert "bad failed at step 0" in told.text(".log")


@pytest.mark.parametrize("width", [390, 1440])
def test_pages_of_runs_in_trouble_violate_no_rule(many: str, tab: Opener, width: int) -> None:
    told = tab(many, width=width)
    told.open("run=bad")
    for run in ("bad", "warm"):
        found = violations(told, f"run={run}&base=sweep-01", ["overview", "runs", "chat"])
        assert not found, found


def test_a_warmup_shows_its_progress_and_its_loss(many: str, tab: Opener) -> None:
    told = tab(many)
    page = told.open("run=warm")
    text = told.text()
    assert "30 of 60 steps" in text and "30 s left" in text and "Loss 0.2" in text
    assert page.locator("#main .spark").count() == 1
    assert page.locator("#control-stop").count() == 1


def test_a_chart_is_enlarged_given_a_range_and_saved(
    many: str, tab: Opener, tmp_path: Path
) -> None:
    told = tab(many)
    fragment = "page=curves&columns=rollout/reward_mean"
    page = told.open(f"run=sweep-10&with=sweep-20&{fragment}")
    before = page.locator(".plot").bounding_box()
    page.click("[aria-label='Enlarge rollout/reward_mean']")
    told.until("document.querySelector('.chart.large') !== null")
    after = page.locator(".plot").bounding_box()
    assert before and after and after["height"] > 1.5 * before["height"]
    page.fill("[aria-label='rollout/reward_mean: y from']", "0.2")
    page.keyboard.press("Enter")
    page.fill("#steps-from", "2")
    page.keyboard.press("Enter")
    told.until("location.hash.includes('from=2')")
    told.settle()
    with page.expect_download() as table:
        page.click("[aria-label='Save as a table: rollout/reward_mean']")
    table.value.save_as(tmp_path / "table.csv")
    rows = [*csv.reader((tmp_path / "table.csv").read_text().splitlines())]
    assert rows[0] == ["step", "rollout/reward_mean sweep-10", "rollout/reward_mean sweep-20"]
    assert rows[1:] == [[str(step), "0.25", "0.5"] for step in (2, 3, 4)]
    with page.expect_download() as picture:
        page.click("[aria-label='Save as a picture: rollout/reward_mean']")
    picture.value.save_as(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_twelve_lines_have_twelve_colours(many: str, tab: Opener) -> None:
    told = tab(many)
    others = ",".join(f"sweep-{number:02}" for number in range(1, 12))
    page = told.open(f"run=sweep-00&page=curves&columns=train/loss&with={others}")
    colours = page.eval_on_selector_all(
        ".line-sign", "signs => signs.map(sign => sign.style.borderColor)"
    )
    assert len(colours) == len(set(colours)) == 12
    assert page.locator("#side .swatch").count() == 12


def test_ticks_of_an_axis_differ(many: str, tab: Opener) -> None:
    """Also where the figures do only behind the third digit."""
    told = tab(many)
    page = told.open("run=sweep-00")
    ticks = page.evaluate(
        "import('./static/format.js').then(m => m.ticks([0.9911, 0.9912, 0.99125, null]))"
    )
    assert ticks == ["0.9911", "0.9912", "0.99125", ""]


def test_the_command_is_shown_before_it_is_run(many: str, tab: Opener) -> None:
    told = tab(many)
    page = told.open("run=sweep-03")
    page.click("#control-resume")
    assert "miles resume sweep-03" in told.text("dialog.control")
    page.fill(".command-rest", "--steps nonsense")
    page.click("dialog .main-button")
    told.until("document.querySelector('dialog.control').textContent.includes('exit code 2')")
    assert "valid integer" in told.text("dialog.control pre")
    page.click("dialog.control button:text-is('Close')")
    told.until("document.querySelector('dialog.control') === null")


def test_a_note_is_written_in_the_table(many: str, folder: Path, tab: Opener) -> None:
    told = tab(many)
    page = told.open("run=sweep-03&page=runs&q=sweep-11")
    page.click("[aria-label='Write a note about sweep-11']")
    page.fill("[aria-label='Note about sweep-11']", "a good one #keep")
    page.keyboard.press("Enter")
    told.until("document.querySelector('.note-cell').textContent.includes('#keep')")
    assert (folder / "sweep-11" / "note.txt").read_text() == "a good one #keep\n"


def test_a_saved_note_is_shown_although_older_news_come(
    many: str, folder: Path, tab: Opener
) -> None:
    told = tab(many)
    told.page.add_init_script(HELD_RUNS)
    page = told.open("run=sweep-03&page=runs&q=sweep-12")
    page.evaluate("Object.assign(window, { isHeld: true, asked: 0 })")
    told.until("window.asked > 0")
    page.click("[aria-label='Write a note about sweep-12']")
    page.fill("[aria-label='Note about sweep-12']", "the best")
    page.keyboard.press("Enter")
    until((folder / "sweep-12" / "note.txt").exists)
    page.evaluate("window.isHeld = false")
    told.until("document.querySelector('.note-cell input') === null")
    assert "the best" in told.text(".note-cell")


def test_a_note_that_cannot_be_saved_stays_with_the_reason(
    many: str, folder: Path, tab: Opener
) -> None:
    told = tab(many)
    told.may_be_refused = True
    refusal = {"what": "the note was not kept", "why": "the disk is full", "fix": ""}
    told.page.route("**/note", lambda route: route.fulfill(status=400, json=refusal))
    page = told.open("run=sweep-03&page=runs&q=sweep-13")
    field = "[aria-label='Note about sweep-13']"
    page.click("[aria-label='Write a note about sweep-13']")
    page.fill(field, "hours of thoughts")
    page.keyboard.press("Enter")
    page.wait_for_selector(".note-cell [role=alert]:has-text('the disk is full')")
    assert page.evaluate("document.activeElement.ariaLabel") == "Note about sweep-13"
    page.fill("#run-search", "sweep-1")
    told.until("document.querySelectorAll('#main tbody tr').length === 10")
    assert page.input_value(field) == "hours of thoughts"
    page.unroute("**/note")
    page.focus(field)
    page.keyboard.press("Enter")
    told.until("document.querySelector('.note-cell input') === null")
    assert (folder / "sweep-13" / "note.txt").read_text() == "hours of thoughts\n"
