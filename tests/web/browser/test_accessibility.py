"""Every page passes the rules of axe, in light and dark, at the widths of a phone, a tablet and a
desk, and fits the width of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import open_run
from milescli.report.compare import compare
from milescli.report.subject import read_subject
from milescli.web.saved import compare_page
from tests.web.browser.conftest import Opener, Tab

PAGES = [
    *("overview", "curves", "samples", "time", "memory", "evaluations", "recipe", "logs"),
    *("runs", "chat", "rewards"),
]
RULES = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
"""Scheme -> what axe looks at: in the dark all but the colours is the same."""


@pytest.mark.parametrize("width", [375, 768, 1440])
def test_no_page_violates_a_rule(url: str, tab: Opener, width: int) -> None:
    told = tab(url, width=width)
    told.open("run=quickstart-1")
    found = violations(told, "run=quickstart-1", PAGES)
    assert not found, found


@pytest.mark.parametrize("width", [375, 1440])
def test_a_saved_page_violates_none_either(
    runs: Path, tmp_path: Path, tab: Opener, width: int
) -> None:
    subjects = (read_subject(open_run(runs / f"quickstart-{n}")) for n in (1, 2))
    file = tmp_path / "both.html"
    file.write_text(compare_page(compare(*subjects)), encoding="utf-8")
    told = tab(file.as_uri(), width=width, bypass_csp=True)
    told.open()
    found = violations(told, "run=quickstart-1&with=quickstart-2", ["comparison", "samples"])
    assert not found, found


def violations(told: Tab, view: str, names: Sequence[str]) -> list[tuple[str, str, str, list[str]]]:
    """Of pages of a tab: scheme, page, rule, elements."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install -r docker/requirements-dev.txt"
    ).Axe()
    page = told.page
    page.evaluate(axe.axe_script)
    found = []
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for name in names:
            told.go(f"{view}&page={name}")
            checked = page.evaluate(
                "rules => axe.run(document, rules)", {**rules, "resultTypes": ["violations"]}
            )
            for violation in checked["violations"]:
                nodes = [node["html"][:160] for node in violation["nodes"][:3]]
                found.append((scheme, name, violation["id"], nodes))
            beside = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if beside > 0:
                found.append((scheme, name, "wider than the window", [str(beside)]))
    return found


def test_runs_are_folded_on_a_phone(url: str, tab: Opener) -> None:
    page = tab(url, width=375).open("run=quickstart-1")
    assert not page.locator("#side").is_visible()
    page.click("#menu")
    assert page.locator("#side").is_visible()
    page.click("#side a:has-text('quickstart-2')")
    page.wait_for_selector("#head h1:text-is('quickstart-2')")
    assert not page.locator("#side").is_visible()
    page.keyboard.press("m")
    assert page.locator("#side").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#side").is_visible()


def test_nothing_moves_for_those_who_want_it_still(url: str, tab: Opener) -> None:
    page = tab(url).open("run=quickstart-1")
    moving = page.evaluate(
        "document.getAnimations().filter((one) => one.playState === 'running').length"
    )
    assert moving == 0
