"""A clock that goes on a second a look, so that a busy machine makes nobody silent."""

from __future__ import annotations

from itertools import count

import pytest

from milescli.core import silence


@pytest.fixture(autouse=True)
def a_second_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts looks, whatever else the machine does."""
    seconds = count()
    monkeypatch.setattr(silence, "monotonic", lambda: float(next(seconds)))
