"""The strictest reward: the answer is the label."""

from __future__ import annotations


def exact_match(*, prompt: str, response: str, label: str | None) -> float:
    """1.0 where the whole answer equals the label, white space at both ends aside; else 0.0."""
    if label is None:
        raise ValueError("`exact_match` needs a label")
    return float(response.strip() == label.strip())
