"""Tests of the strictest reward."""

from __future__ import annotations

import pytest

from milescli.rollout.rewards.exact_match import exact_match


@pytest.mark.parametrize(
    ("response", "reward"), [("yes", 1.0), (" yes\n", 1.0), ("Yes", 0.0), ("yes.", 0.0), ("", 0.0)]
)
def test_only_the_label_itself_is_accepted(response: str, reward: float) -> None:
    assert exact_match(prompt="", response=response, label="yes ") == reward


def test_a_missing_label_raises() -> None:
    with pytest.raises(ValueError, match="needs a label"):
        exact_match(prompt="", response="", label=None)


def test_a_missing_label_is_a_fault_before_any_response() -> None:
    assert exact_match.check_label(None) == "`exact_match` needs a label"
    assert exact_match.check_label("yes") is None
