"""What a model wrote is text on the page: no markup of it is drawn, no script of it runs, and
characters that hide or turn text are made visible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from milescli.core.events import Notice
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGE = "<img src=x onerror=\"document.title='taken'\">"
SCRIPT = "<script>document.title='taken'</script><b id=bold>bold</b>"
TURNED = "abc\u202ecba\u2066 zero\u200bwidth"
TOKENS = [IMAGE, TURNED, "</span>", "\ud83d\ude00", "<|im_end|>"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[str]:
    """The URL of a run whose model, prompts, notices and logs attack the page."""
    folder: Path = tmp_path_factory.mktemp("hostile") / "runs"
    run = WrittenRun(path=folder / "hostile-1")
    run.steps(1, 3)
    run.tell(Notice(text=IMAGE + TURNED))
    line = {
        "text": "".join(TOKENS),
        "lengths": [len(token) for token in ("".join(TOKENS[:1]), *TOKENS[1:3], "x", TOKENS[4])],
        "mask": [0, 5],
        "logprobs": [-0.1] * 5,
        "versions": [[0, 5, 1]],
    }
    whole = {"prompt": IMAGE + TURNED, "response": SCRIPT + TURNED, "label": SCRIPT}
    run.keep(1, {**whole, "lines": [line]}, {**whole, "reward_parts": {IMAGE: 1.0}})
    run.attempt(engine_0=f"{IMAGE}\n{SCRIPT}\n{TURNED}\n\x1b[31mred\x1b[0m\n")
    with served(folder=folder) as url:
        yield url


@pytest.mark.parametrize("page_name", ["overview", "samples", "time", "logs"])
def test_nothing_of_it_becomes_markup(hostile: str, tab: Opener, page_name: str) -> None:
    told = tab(hostile)
    page = told.open(f"page={page_name}")
    assert page.locator("#main img, #main script, #main #bold").count() == 0
    assert page.title() != "taken"
    if page_name != "overview":
        assert "<img src=x" in told.text()


def test_hidden_characters_are_shown_by_name(hostile: str, tab: Opener) -> None:
    told = tab(hostile)
    page = told.open("page=samples&step=1")
    for place in (".prompt .text", ".sample .tokens"):
        text = told.text(place)
        assert "U+202E" in text
        assert "U+2066" in text
        assert "U+200B" in text
        assert not set(text) & {"\u202e", "\u2066", "\u200b"}
    page.hover(".token >> nth=1")
    assert "U+202E" in told.text(".readout")


def test_search_marks_within_hostile_text(hostile: str, tab: Opener) -> None:
    told = tab(hostile)
    page = told.open("page=samples&step=1&q=onerror")
    assert page.locator(".sample mark").first.inner_text() == "onerror"
    page.click("button:text-is('All steps')")
    page.wait_for_selector(".found a")
    assert page.locator(".found img").count() == 0


def test_a_hostile_address_is_harmless(hostile: str, tab: Opener) -> None:
    told = tab(hostile)
    for fragment in (
        "page=curves&columns=" + IMAGE,
        "page=samples&step=" + SCRIPT,
        "page=" + IMAGE,
    ):
        page = told.open(fragment)
        assert page.title() != "taken"
        assert page.locator("#main img").count() == 0
