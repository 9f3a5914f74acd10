"""A run that was written, and a page's server over its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from milescli.web import files, logs, samples
from tests.fake_run import WrittenRun
from tests.web.serving import client_of, site_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of runs."""
    return tmp_path / "runs"


@pytest.fixture
def run(folder: Path) -> WrittenRun:
    """Nothing has happened in it yet."""
    return WrittenRun(path=folder / "tiny-1")


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    """Of all runs of the folder."""
    with client_of(site_of(folder)) as client:
        yield client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search ends for time because the machine is busy."""
    monkeypatch.setattr(files, "COUNT_S", 120.0)
    monkeypatch.setattr(logs, "SEARCH_S", 120.0)
    monkeypatch.setattr(samples, "SEARCH_S", 120.0)
