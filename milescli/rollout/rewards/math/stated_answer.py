r"""Extracts the answer of a response: the last box, what follows `####`, what follows "the answer
is", the last formula, or the last number. Pure text; runs in the `math` reward's processes."""

from __future__ import annotations

import re

from milescli.rollout.rewards.text.response_parts import last_boxed

MARK = "####"
_SHORT = 80
"""Characters of a response that may be an answer and nothing else."""
_SAID = re.compile(
    r"(?:\banswer(?:\s+is|\s*:|\s*=)?|^\s*\**A\s*:)\s*\**\s*:?\s*", re.IGNORECASE | re.MULTILINE
)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SENTENCE_END = re.compile(r"(?<!\.)\.(?=\s|$)|\n|,?\s+(?:because|since|so|which)\b")
_NUMBER = re.compile(
    r"[-\u2212]?[$€£]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?\s*%?(?!\w)"
)
_JOINED = re.compile(r"\s*(?:,|;|(?:,\s*)?(?:or|and)\b)\s*")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\w*\s*\{[^{}]*\}")
_NOT_WORDS = re.compile(r"\\(?:[a-zA-Z]+|.)|[^a-zA-Z\\]+", re.DOTALL)
_PLAIN_WORD = re.compile(r"or|and|sqrt|pi|sin|cos|tan|log|ln|exp|percent|degrees", re.IGNORECASE)
_MAX_WORDS = 3


def stated(response: str) -> str:
    r"""The answer's text; empty where there is none. `\boxed{}` counts before all else, and the
    last one only. Numbers and formulas that are joined (`7 or 8`) are one answer."""
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    if MARK in response:
        return response.rpartition(MARK)[2].strip().partition("\n")[0].strip()
    text = response.strip()
    said = list(_SAID.finditer(text))
    if said:
        after = _SENTENCE_END.split(text[said[-1].end() :], maxsplit=1)[0].strip()
        if after and (answer := _within(after, is_said=True)):
            return answer
    return _within(text, is_said=False)


def _within(text: str, *, is_said: bool) -> str:
    """`is_said`: the text is called the answer."""
    text = text.strip()
    formulas = list(_FORMULA.finditer(text))
    if len(formulas) == 1 and formulas[0][0] == text.rstrip("."):
        return _inner(formulas[0])
    if not formulas and len(text) <= _SHORT and "\n" not in text and _is_bare(text, is_said):
        return text
    return _last_joined(text, formulas or list(_NUMBER.finditer(text)))


def _is_bare(text: str, is_said: bool) -> bool:
    """An answer and nothing else: mathematics, a few words behind a number, or what is called the
    answer in a few words."""
    words = [
        word
        for word in _NOT_WORDS.sub(" ", _TEXT.sub(" ", text)).split()
        if len(word) > 1 and not _PLAIN_WORD.fullmatch(word)
    ]
    starts_as_one = not text[:1].isalpha() or (is_said and not re.search(r"\d", text))
    return not words or (starts_as_one and len(words) <= _MAX_WORDS)


def _last_joined(text: str, matches: list[re.Match[str]]) -> str:
    """The last one, with those before it that `or`, `and` or a comma joins to it."""
    if not matches:
        return ""
    taken = [matches[-1]]
    for match in reversed(matches[:-1]):
        between = text[match.end() : taken[0].start()]
        if not _JOINED.fullmatch(between):
            break
        taken.insert(0, match)
    return ", ".join(_inner(match) for match in taken)


def _inner(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group), match[0])
