"""The strictest reward: the response is the label."""

from __future__ import annotations

from milescli.recipe.rewards import MatchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.squad import normalized
from milescli.rollout.rewards.text_parts import part_of, texts_of


class ExactMatch:
    """1.0 where the whole response equals the label, white space at both ends aside; else 0.0.

    `rollout.match.answer`: another part of the response than the whole. `rollout.match.normalize:
    squad`: small letters, without punctuation, articles and white space (SQuAD's exact match); the
    label may then be a JSON list of texts, of which any will do.
    """

    needs_label = True

    def __init__(self, settings: MatchSettings) -> None:
        self._settings = settings

    def made_for(self, rollout: Rollout) -> ExactMatch:
        """See REWARDS."""
        return ExactMatch(rollout.match)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        if label is None:
            raise ValueError("`exact_match` needs a label")
        part = part_of(response, self._settings.answer)
        if part is None:
            return 0.0
        if self._settings.normalize == "none":
            return float(part == label.strip())
        return float(any(normalized(part) == normalized(text) for text in texts_of(label)))

    def answer(self, response: str) -> str | None:
        """The part that is compared; None where it is not there, or empty."""
        part = part_of(response, self._settings.answer)
        if part is not None and self._settings.normalize == "squad":
            part = normalized(part)
        return part or None

    def check_label(self, label: str | None) -> str | None:
        """Any label will do; normalised, something must be left of it."""
        if label is None:
            return "`exact_match` needs a label"
        is_empty = self._settings.normalize == "squad" and not any(map(normalized, texts_of(label)))
        return "nothing is left of it when it is normalised" if is_empty else None


exact_match = ExactMatch(MatchSettings())
"""The built-in reward `exact_match`."""
