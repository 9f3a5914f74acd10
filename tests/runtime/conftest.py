"""Of tests of silence."""

from __future__ import annotations

from itertools import count

import pytest

from milescli.core import silence


@pytest.fixture
def a_second_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of silence goes on a second a look: a busy machine makes nobody silent."""
    seconds = count()
    monkeypatch.setattr(silence, "monotonic", lambda: float(next(seconds)))
