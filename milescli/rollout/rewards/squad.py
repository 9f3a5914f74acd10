"""SQuAD's way to compare short answers (arXiv 1606.05250, section 6.1): normalisation, and the
reward `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter

from milescli.recipe.rewards import MatchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.text_parts import part_of, texts_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Small letters, without punctuation and articles, one blank between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_of(text: str, wanted: str) -> float:
    """2PR / (P + R) of the words that both have, each as often as in both; 1.0 where both are empty
    when normalised, 0.0 where one is."""
    words, right = normalized(text).split(), normalized(wanted).split()
    if not words or not right:
        return float(words == right)
    num_common = (Counter(words) & Counter(right)).total()
    return 2 * num_common / (len(words) + len(right))


class F1:
    """Share of words that response and label have in common: the F1 of SQuAD, from 0.0 to 1.0, in
    small letters and without punctuation and articles.

    Label: a text, or a JSON list of texts, of which the best counts. `rollout.match.answer`: which
    part of the response is compared; where it is not there, 0.0.
    """

    needs_label = True

    def __init__(self, settings: MatchSettings) -> None:
        self._settings = settings

    def made_for(self, rollout: Rollout) -> F1:
        """See REWARDS."""
        return F1(rollout.match)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        if label is None:
            raise ValueError("`f1` needs a label")
        part = part_of(response, self._settings.answer)
        return 0.0 if part is None else max(f1_of(part, text) for text in texts_of(label))

    def check_label(self, label: str | None) -> str | None:
        """Why no response can be right; None: one can."""
        if label is None:
            return "`f1` needs a label"
        return None if any(map(normalized, texts_of(label))) else "it holds no word"


f1 = F1(MatchSettings())
"""The built-in reward `f1`."""
