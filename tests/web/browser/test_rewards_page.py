"""Another reward is tried on the page: its figures and the texts that it judges otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener
from tests.web.browser.test_accessibility import violations

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def controlled(browser: Browser, runs: Path) -> Iterator[str]:
    """URL of a page that may start commands."""
    with served(folder=runs, words=["--control"]) as url:
        yield url


def test_a_reward_is_tried_and_its_samples_are_shown(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    page = told.open("run=quickstart-1&page=rewards")
    page.fill("#reward-name", "format")
    page.fill("#reward-last", "3")
    page.keyboard.press("Enter")
    told.shows("with another reward")
    text = told.text()
    assert "as recorded" in text and "same verdict" in text and "kappa" in text
    assert page.locator(".evaluated li").count() > 0
    told.until("!document.querySelector('#reward-try').disabled")
    found = violations(told, "run=quickstart-1", [])
    assert not found, found


def test_a_reward_that_is_not_there_is_named(controlled: str, tab: Opener) -> None:
    told = tab(controlled)
    page = told.open("run=quickstart-1&page=rewards")
    page.fill("#reward-name", "maths")
    page.click("#reward-try")
    told.shows("there is no reward")
    assert "math" in told.text(".problem")
