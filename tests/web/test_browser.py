"""The key is on no command line when the page is opened."""

from __future__ import annotations

import stat
from pathlib import Path
from urllib.parse import urlparse

import pytest

from milescli.web import browser


def test_a_browser_is_led_by_a_file_that_only_its_owner_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = list[str]()
    monkeypatch.setattr(browser.webbrowser, "open", lambda url: opened.append(url) or True)
    browser.open_page("http://127.0.0.1:8/?key=secret&a=1", failed=pytest.fail)
    [url] = opened
    file = Path(urlparse(url).path)
    assert "secret" not in url
    assert 'content="0;url=http://127.0.0.1:8/?key=secret&amp;a=1"' in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_computer_without_a_browser_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser.webbrowser, "open", lambda url: False)
    told = list[str]()
    browser.open_page("http://127.0.0.1:8/?key=secret", failed=told.append)
    assert len(told) == 1 and "secret" not in told[0]
