"""A report in a browser: the pages of `miles ui`, from a file, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import open_run
from milescli.report.compare import compare
from milescli.report.subject import read_subject
from milescli.web.saved import compare_page, run_page, sweep_page
from tests.report.run_folders import make_planted, write_samples
from tests.web.browser.conftest import Opener

EVIL = "</script><!--<script>document.title='broken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of the file of one run."""
    file = tmp_path_factory.mktemp("report") / "one.html"
    file.write_text(run_page(read_subject(open_run(runs / "quickstart-1"))), encoding="utf-8")
    return file.as_uri()


def test_every_page_of_the_run_is_drawn(report: str, tab: Opener) -> None:
    told = tab(report)
    page = told.open()
    titles = page.locator("#pages a").all_inner_texts()
    assert titles == ["Overview", "Curves", "Samples", "Time", "Memory", "Evaluations",
                      "Recipe & plan"]  # fmt: skip
    assert "99.5 %" in told.text() and "Made by miles" in told.text("#side")
    for title in titles:
        page.click(f"#pages a:text-is('{title}')")
        page.wait_for_selector(f"#main > section[aria-label='{title}']")
        told.settle()
        assert page.locator(".problem").count() == 0, told.text()
        if title in ("Curves", "Time", "Memory", "Evaluations"):
            assert page.locator("#main canvas").count() > 0
    assert page.url.startswith("file://")


def test_curves_zoom_and_mark_a_step(report: str, tab: Opener) -> None:
    told = tab(report)
    page = told.open("page=curves&columns=train/loss&from=5&to=9")
    assert page.locator(".chart").count() == 1
    assert "from" in page.get_attribute(".chart .plot", "aria-label")
    page.keyboard.press("k")
    told.until("location.hash.includes('step=')")


def test_samples_notices_and_steps_are_found(report: str, tab: Opener) -> None:
    told = tab(report)
    page = told.open("page=samples")
    page.click("button:text-is('All steps')")
    page.fill("#sample-search", "####")
    page.click("button:text-is('All steps')")
    page.wait_for_selector(".found a")
    told.open("page=time&kind=CheckpointSaved&first=3&last=4")
    rows = page.locator(".notices li").all_inner_texts()
    assert rows and all("checkpoint" in text for text in rows)
    page.click("summary:text-is('As a table')")
    page.wait_for_selector("[aria-label=Intervals] tbody td")
    cells = page.locator("[aria-label=Intervals] tbody td:nth-child(3)").all_inner_texts()
    assert {"3", "4"} <= set(cells) and not {"2", "5"} & set(cells)


def test_two_runs_open_at_their_comparison(runs: Path, tmp_path: Path, tab: Opener) -> None:
    subjects = (read_subject(open_run(runs / f"quickstart-{n}")) for n in (1, 2))
    file = tmp_path / "both.html"
    file.write_text(compare_page(compare(*subjects)), encoding="utf-8")
    told = tab(file.as_uri())
    page = told.open()
    assert "Reward: the two runs differ: quickstart-1 is higher." in told.text()
    page.click("a:text-is('Show the curves of both')")
    told.until("document.querySelectorAll('.chart .legend li').length >= 2")
    told.settle()
    assert "quickstart-2" in told.text(".chart .legend")


def _trial(number: int, accuracy: float | None, **settings: str) -> dict[str, object]:
    return {
        "run": f"quickstart-{number}",
        "settings": settings,
        "state": "done" if accuracy is not None else "failed",
        "step": 10,
        "accuracy": accuracy,
        "interval": None,
        "error": {} if accuracy is not None else {"error": EVIL, "why": ""},
        "evaluations": [(0, 0.1), (10, accuracy or 0.2)],
        "curve": [(1, 0.1), (2, 0.3), (3, 0.2)],
        "is_comparable": accuracy is not None,
    }


def test_a_sweep_opens_at_its_trials_and_leads_to_their_runs(
    runs: Path, tmp_path: Path, tab: Opener
) -> None:
    subjects = [read_subject(open_run(runs / f"quickstart-{n}")) for n in (1, 2)]
    lr, rule = "train.optimizer.lr", "train.optimizer.rule"
    sweep = {
        "name": "swept",
        "headline": f"best of 4 trials: quickstart-1 {EVIL}",
        "notes": ["partly luck"],
        "dimensions": [
            {"key": rule, "kind": "choice", "values": ["adamw", "muon"], "low": 0, "high": 0},
            {"key": lr, "kind": "loguniform", "values": [], "low": 1e-5, "high": 1e-2},
        ],
        "importance": {"method": "PED-ANOVA", "by_key": {lr: 0.8, rule: 0.2}, "num_trials": 4},
        "trials": [
            _trial(1, 0.9, **{lr: "1e-4", rule: "muon"}),
            _trial(2, 0.7, **{lr: "1e-3", rule: "adamw"}),
            _trial(3, 0.7, **{lr: "1e-3", rule: "adamw"}),
            _trial(4, 0.2, **{lr: "1e-5", rule: "muon"}),
            _trial(5, None, **{lr: "1e-2", rule: "muon"}),
        ],
        "winner": "quickstart-1",
        "command": "miles launch runs/swept/winner.yaml",
    }
    file = tmp_path / "swept.html"
    file.write_text(sweep_page(sweep, subjects, made_s=0.0), encoding="utf-8")
    told = tab(file.as_uri())
    page = told.open()
    assert EVIL in told.text() and page.locator("img").count() == 0
    titles = page.locator(".chart h2").all_inner_texts()
    assert titles == [
        "Held-out accuracy",
        "Reward or loss of the steps",
        f"{rule} against {lr}",
        f"Accuracy by {lr}",
        f"Accuracy by {rule}",
    ]
    assert page.locator("[aria-label=Trials] tbody tr").count() == 5
    assert page.locator("[aria-label=Trials] tbody a").all_inner_texts() == [
        "quickstart-1",
        "quickstart-2",
    ]
    page.click("[aria-label=Trials] a:text-is('quickstart-2')")
    told.until("location.hash.includes('page=overview')")
    told.settle()
    assert "quickstart-2" in told.text("#head")


def test_what_a_model_wrote_is_text(tmp_path: Path, tab: Opener) -> None:
    folder = make_planted(tmp_path / "evil", error={"error": EVIL, "why": "", "fix": []})
    write_samples(folder, 80, [0.0, 1.0], EVIL)
    file = tmp_path / "evil.html"
    file.write_text(run_page(read_subject(open_run(folder))), encoding="utf-8")
    told = tab(file.as_uri())
    page = told.open()
    assert EVIL in told.text("[aria-label='What ended it']")
    told.go("page=samples")
    assert EVIL in told.text(".sample") and page.locator("img").count() == 0
    assert page.title() == "Samples · evil · miles"


def test_a_report_names_the_log_that_it_leaves_out_without_a_link(
    tmp_path: Path, tab: Opener
) -> None:
    error = {"error": "trainer rank 0 died", "why": "it was killed", "fix": []}
    folder = make_planted(tmp_path / "bad", error=error)
    log = folder / "logs" / "attempt_1" / "trainer-rank-0.log"
    log.write_text("the last words\n", encoding="utf-8")
    file = tmp_path / "bad.html"
    file.write_text(run_page(read_subject(open_run(folder))), encoding="utf-8")
    told = tab(file.as_uri())
    page = told.open()
    assert "the last words" in told.text("[aria-label='What ended it']")
    assert not page.locator("[aria-label='What ended it'] a").count()
