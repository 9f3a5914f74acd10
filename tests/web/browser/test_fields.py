"""Fields that are kept in the address follow it: a link, the way back, a change by hand."""

from __future__ import annotations

import pytest

from tests.web.browser.conftest import Opener

RUN = "run=quickstart-1"
FIELDS = {
    "kind of what happened": ("time", "kind=Notice", "[aria-label='Kind']", "Notice"),
    "its level": ("time", "level=warning", "[aria-label='Level']", "warning"),
    "its search": ("time", "notice=steps", "[aria-label='Search what happened']", "steps"),
    "the first step of the timeline": ("time", "first=3", "#timeline-first", "3"),
    "the search among keys": ("recipe", "key=lr", "[aria-label='Search keys']", "lr"),
    "the search in samples": ("samples", "q=12", "#sample-search", "12"),
    "the search in a log": ("logs", "q=server", "#log-search", "server"),
}
"""Page, what its address says, the field that says the same, its value."""


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_follows_the_address(url: str, tab: Opener, name: str) -> None:
    page_name, query, field, value = FIELDS[name]
    told = tab(url)
    page = told.open(f"{RUN}&page={page_name}")
    assert page.input_value(field) == ""
    page.focus(field)
    told.go(f"{RUN}&page={page_name}&{query}")
    assert page.input_value(field) == value
    page.go_back()
    told.settle()
    assert page.input_value(field) == ""


def test_which_keys_are_shown_follows_the_address(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=recipe")
    field = page.get_by_label("Only what was set")
    assert field.is_checked()
    told.go(f"{RUN}&page=recipe&keys=all")
    assert not field.is_checked()


def test_the_filters_of_what_happened_are_in_the_address(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=time")
    everything = page.locator(".notices li").count()
    page.select_option("[aria-label='Kind']", "PhaseStarted")
    told.until("location.hash.includes('kind=PhaseStarted')")
    told.settle()
    assert 0 < page.locator(".notices li").count() < everything


def test_what_was_typed_last_does_not_follow_to_another_page(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=logs")
    page.evaluate(
        "() => { const field = document.querySelector('#log-search'); field.value = 'nothing';"
        " field.dispatchEvent(new Event('input')); location.hash = 'run=quickstart-1&page=samples'"
        " }"
    )
    page.wait_for_selector("#main > section[aria-label='Samples']")
    page.wait_for_timeout(600)
    assert "q=" not in page.url


def test_what_one_run_has_does_not_follow_to_another(url: str, tab: Opener) -> None:
    told = tab(url)
    page = told.open(f"{RUN}&page=evaluations&path=eval/step_10.jsonl&offset=20&only=right")
    page.click("#run-quickstart-2")
    told.until("location.hash === '#run=quickstart-2&page=evaluations'")
    told.go(f"{RUN}&page=curves&marks=3-9&step=4&smooth=0.5")
    page.keyboard.press("[")
    told.until("location.hash === '#run=quickstart-2&page=curves&smooth=0.5'")
    told.go(f"{RUN}&page=runs&only=done&q=quick")
    page.click("#run-quickstart-2")
    told.until("location.hash === '#run=quickstart-2&page=runs&only=done&q=quick'")
