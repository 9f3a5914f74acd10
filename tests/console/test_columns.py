"""Numbers as people read them."""

from __future__ import annotations

import pytest

from milescli.console.columns import percent


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.785, "78.5%"), (1.0, "100.0%"), (0.0, "0.0%"), (2.4121, "2.412"), (-1.98, "-1.980")],
)
def test_what_is_no_share_is_not_shown_as_one(share: float, shown: str) -> None:
    assert percent(share) == shown
