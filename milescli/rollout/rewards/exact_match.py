"""The strictest reward: the response is the label."""

from __future__ import annotations


class ExactMatch:
    """1.0 where the whole response equals the label, white space at both ends aside; else 0.0."""

    needs_label = True

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        if label is None:
            raise ValueError("`exact_match` needs a label")
        return float(response.strip() == label.strip())

    def check_label(self, label: str | None) -> str | None:
        """Any label will do."""
        return "`exact_match` needs a label" if label is None else None


exact_match = ExactMatch()
"""The built-in reward `exact_match`."""
