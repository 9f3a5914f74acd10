"""The HTML report of a run: one file that asks nothing of anybody, and tells nothing private."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import open_run
from milescli.report.make import run_figures
from milescli.report.run_page import run_page
from milescli.report.subject import read_subject
from tests.insight.planted import Planted, line
from tests.report.run_folders import (
    make_planted,
    make_run,
    make_several,
    make_sick,
    row_events,
    write_evaluation,
    write_samples,
)

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"
CHROMIUM = shutil.which("chromium-headless-shell")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> str:
    """Of a run's directory."""
    return run_page(read_subject(open_run(folder)))


def parsed(page: str) -> _Tags:
    """Its tags and texts."""
    tags = _Tags()
    tags.feed(page)
    return tags


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything, and whose model writes what no page should run."""
    folder = make_planted(tmp_path_factory.mktemp("runs") / "planted-1", lost=(12,))
    for step in (1, 40, 80):
        write_samples(folder, step, [0.0, 1.0, 0.0, 0.5], f"{EVIL} hf_{'a' * 20} at step {step}")
    write_evaluation(folder, 80, 0.7, seed=1)
    return folder


def test_the_verdict_comes_first_and_every_part_follows(whole: Path) -> None:
    tags = parsed(page_of(whole))
    headline = read_subject(open_run(whole)).verdict.headline
    order = [
        headline,
        "Is it learning?",
        "Where does the time go?",
        "What does it say?",
        "Evaluations",
        "Recipe",
        "no GPU is visible",
        "Versions and machine",
    ]
    places = [tags.text.index(words) for words in order]
    assert places == sorted(places)
    assert "engine 1" in tags.text and "95% interval" in tags.text


def test_what_a_model_wrote_is_text(whole: Path) -> None:
    tags = parsed(page_of(whole))
    assert EVIL in tags.text and "img" not in {tag for tag, _ in tags.seen}
    assert [attributes.get("type") for tag, attributes in tags.seen if tag == "script"] == [
        "application/json",
        None,
    ]
    attributes = {name for _, told in tags.seen for name in told}
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"style"})


def test_the_policy_allows_its_own_script_and_style_alone_and_nothing_is_loaded(
    whole: Path,
) -> None:
    page = page_of(whole)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    for name in ("script", "style"):
        body = re.findall(rf"<{name}>(.*?)</{name}>", page, re.S)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    tags = parsed(page)
    assert not [told for _, told in tags.seen if {"src", "href", "srcset", "action"} & set(told)]


def test_no_secret_and_no_place_of_the_machine_is_told(whole: Path) -> None:
    page = page_of(whole)
    for word in ("s3cret", "hf_a", "/data/alice", str(whole), "alice"):
        assert word not in page, word
    assert "…/Qwen3" in page and "[removed]" in page and "sums.jsonl, 8,192 rows" in page


def test_a_long_run_is_still_a_small_file(tmp_path: Path) -> None:
    page = page_of(make_planted(tmp_path / "long", steps=3000, eval_every=100))
    assert len(page.encode()) < 900_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert max(len(line["x"]) for chart in data["charts"] for line in chart["lines"]) <= 800


@pytest.mark.skipif(CHROMIUM is None, reason="chromium-headless-shell is not installed")
def test_a_browser_draws_its_charts_and_refuses_nothing(whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(whole), encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--no-sandbox",
            "--enable-logging=stderr",
            "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"file://{file}",
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    seen = parsed(done.stdout)
    live = [told for _, told in seen.seen if "is-live" in (told.get("class") or "")]
    assert len(live) >= 8 and sum(tag == "canvas" for tag, _ in seen.seen) == len(live)
    assert "broken" not in re.search("<title>(.*?)</title>", done.stdout)[1]
    refused = [text for text in done.stderr.splitlines() if "CONSOLE" in text]
    assert not refused, refused


def test_runs_that_failed_go_on_or_never_began_have_a_page(tmp_path: Path) -> None:
    error = {"error": "engine 0 died of <b>", "why": "SIGKILL at /srv/a/b.log", "fix": ["less x"]}
    planted = Planted(steps=20, error=error)
    failed = page_of(make_run(tmp_path / "failed", planted.events()))
    assert "What ended it" in failed and "engine 0 died of &lt;b&gt;" in failed
    assert "/srv/a" not in failed and "…/b.log" in failed
    going_on = page_of(make_run(tmp_path / "going", Planted(steps=20, ends=False).events()))
    assert "step 20 of 20" in going_on
    empty = page_of(make_run(tmp_path / "empty"))
    assert "No step was done yet." in empty and "not started" in empty
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "recipe.yaml").write_text("")
    assert "not started" in page_of(bare)


def test_findings_memory_and_results_of_miles_eval_are_told(tmp_path: Path) -> None:
    text = parsed(page_of(make_sick(tmp_path / "sick"))).text
    verdict = read_subject(open_run(tmp_path / "sick")).verdict
    for finding in verdict.findings:
        assert finding.title in text and finding.advice[0] in text and finding.source in text
    assert "entropy-explosion" in [finding.name for finding in verdict.findings]
    assert "nats a token (steps 65 to 80)." in text
    assert "hard <sums>104pass@475.0%25.0% to 100.0%" in text
    assert "engine-02.0 GiB2.0 GiB--others1.0 GiB1.0 GiB--" in text
    assert "3.0 GiB at most; the kernel ended 2 of them." in text


def test_of_several_adapters_each_has_its_part(tmp_path: Path) -> None:
    folder = make_several(tmp_path / "several", names=("sums", "words"))
    text = parsed(page_of(folder)).text
    assert "Adapter sums" in text and "Adapter words" in text and "12 of 12" in text
    figures = run_figures(read_subject(open_run(folder)))
    states = [one["summary"]["state"] for one in figures["adapters"].values()]
    assert states == [figures["state"]] * 2 == ["killed"] * 2


def test_a_run_over_rows_tells_of_its_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "rows", row_events(line(2.0, 0.5), line(2.1, 0.7)))
    page = page_of(folder)
    assert 'id="chart-loss"' in page and 'id="chart-reward"' not in page
    assert "Held-out rows" in page and "It learns from rows" in page
