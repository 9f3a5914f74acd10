"""Rewards that compare a short answer with the label: `exact_match`, and `f1`, the F1 of words that
SQuAD defines (arXiv 1606.05250, section 6.1)."""

from __future__ import annotations

import re
import string
from collections import Counter

from milescli.recipe.rewards import MatchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.extraction import part_of, texts_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Return lower case without punctuation and articles, with single blanks between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_of(text: str, wanted: str) -> float:
    """Compute 2PR / (P + R) of the common words, each counted as often as it occurs in both; 1.0 if
    both are empty when normalised, 0.0 if only one is."""
    words, right = normalized(text).split(), normalized(wanted).split()
    if not words or not right:
        return float(words == right)
    num_common = (Counter(words) & Counter(right)).total()
    return 2 * num_common / (len(words) + len(right))


class F1:
    """Returns the F1 of the words that response and label have in common, as SQuAD defines it: from
    0.0 to 1.0, in lower case and without punctuation and articles.

    The label is a text, or a JSON list of texts, of which the best match counts.
    `rollout.match.answer` selects the part of the response to compare; if it is missing, the reward
    is 0.0.

    >>> score(label="Paris", response="the PARIS.")
    1.0
    >>> score(label='["New York", "NYC"]', response="NYC")
    1.0
    >>> score(label="New York", response="York in England")
    0.4
    >>> score(label="Paris", response="Paris", match={"answer": "boxed"})
    0.0
    """

    needs_label = True

    def __init__(self, settings: MatchSettings) -> None:
        self._settings = settings

    def with_settings(self, rollout: Rollout) -> F1:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return F1(rollout.match)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes."""
        if label is None:
            raise ValueError("`f1` needs a label")
        part = part_of(response, self._settings.answer)
        return 0.0 if part is None else max(f1_of(part, text) for text in texts_of(label))

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct, or None."""
        if label is None:
            return "`f1` needs a label"
        return None if any(map(normalized, texts_of(label))) else "it holds no word"


f1 = F1(MatchSettings())
"""The built-in reward `f1`."""


class ExactMatch:
    """Returns 1.0 if the whole response equals the label, without white space at both ends; else
    0.0.

    `rollout.match.answer` selects a part of the response to compare instead of the whole.
    `rollout.match.normalize: squad` compares in lower case, without punctuation, articles and white
    space (SQuAD's exact match); the label may then be a JSON list of texts, any of which is right.

    >>> score(label="Paris", response=" Paris ")
    1.0
    >>> score(label="Paris", response="paris")
    0.0
    >>> score(label='["Paris"]', response="The paris!", match={"normalize": "squad"})
    1.0
    >>> score(label="4", response="2 + 2 = <answer>4</answer>", match={"answer": "tags"})
    1.0
    >>> score(label="4", response="<answer>4</answer>")
    0.0
    """

    needs_label = True

    def __init__(self, settings: MatchSettings) -> None:
        self._settings = settings

    def with_settings(self, rollout: Rollout) -> ExactMatch:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return ExactMatch(rollout.match)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes."""
        if label is None:
            raise ValueError("`exact_match` needs a label")
        part = part_of(response, self._settings.answer)
        if part is None:
            return 0.0
        if self._settings.normalize == "none":
            return float(part == label.strip())
        return float(any(normalized(part) == normalized(text) for text in texts_of(label)))

    def answer(self, response: str) -> str | None:
        """Return the part that is compared; None if it is missing or empty."""
        part = part_of(response, self._settings.answer)
        if part is not None and self._settings.normalize == "squad":
            part = normalized(part)
        return part or None

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct: a normalised label must not be empty. None for any
        other label."""
        if label is None:
            return "`exact_match` needs a label"
        is_empty = self._settings.normalize == "squad" and not any(map(normalized, texts_of(label)))
        return "nothing is left of it when it is normalised" if is_empty else None


exact_match = ExactMatch(MatchSettings())
"""The built-in reward `exact_match`."""
