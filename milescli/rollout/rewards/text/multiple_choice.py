"""The reward `multiple_choice`: the letter, or the letters, that a response chooses."""

from __future__ import annotations

import re

from milescli.rollout.rewards.text.response_parts import ENDS_THINKING, last_boxed, part_of

_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|[*_`$]")
_LETTER = r"\(?\[?([A-Za-z])\]?\)?"
_ALONE = re.compile(rf"(?:option|choice|answer)?\s*{_LETTER}\s*[.:)]?", re.IGNORECASE)
_WITH_TEXT = re.compile(
    r"(?:option|choice)?\s*(?:\(([A-Za-z])\)|([A-Za-z])[.:)])\s+\S.*", re.I | re.S
)
_LIST = re.compile(r"[A-Za-z](?:\s*(?:,\s*and\b|,|&|\band\b)\s*[A-Za-z])+")
_JOINED = re.compile(r"[A-J]{2,}")
_SAID = re.compile(
    r"\b(?:answers?|choices?|options?)\s*(?:is|are|:|would be|must be)\s*:?\s*", re.IGNORECASE
)
_ENDS = re.compile(r"(?<=\S)[.!?](?:\s|$)|\n|,?\s(?:because|since|as|so)\b")


class MultipleChoice:
    r"""1.0 where the response chooses the label's letter, else 0.0.

    Label: a letter, also as `(B)`, `B.` or `B) Paris`; several, `A, C`, are all wanted. Response,
    the first of these that it has: the last `\boxed{}`, the last `<answer>`, what follows its last
    `####`, what follows its last "answer is" or "answer:", its last line. There a letter must
    stand by itself or before its text (`B`, `(b)`, `**B**`, `B) Paris`, `option B`); an article is
    none, and `A or B` chooses nothing. What stands before `</think>` does not count.
    """

    needs_label = True
    examples = (("Which?", "The answer is B.", "B"), ("Which?", "A or B", "B"), ("", "", "A, C"))

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        wanted = None if label is None else _letters(label)
        if wanted is None:
            raise ValueError(f"the label is no letter: {label!r}")
        return float(_letters(_statement(response)) == wanted)

    def answer(self, response: str) -> str | None:
        """The letters that it chooses, in order; None where it chooses nothing."""
        return "".join(sorted(_letters(_statement(response)) or "")) or None

    def check_label(self, label: str | None) -> str | None:
        """Why no response can be right; None: one can."""
        if label is None:
            return "`multiple_choice` needs a label"
        return "it is no letter" if _letters(label) is None else None


def _statement(response: str) -> str:
    text = response.rpartition(ENDS_THINKING)[2].strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if (tagged := part_of(text, "tags")) is not None:
        return tagged
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    if said := list(_SAID.finditer(text)):
        after = _WRAPPED.sub(_kept, text[said[-1].end() :]).strip()
        if _WITH_TEXT.match(after):
            return after.partition("\n")[0]
        return _ENDS.split(after, maxsplit=1)[0]
    return part_of(text, "last_line") or ""


def _kept(match: re.Match[str]) -> str:
    return match[1] or ""


def _letters(text: str) -> frozenset[str] | None:
    """None where no letter is chosen, or it cannot be told which."""
    text = _WRAPPED.sub(_kept, text).strip().rstrip(".").strip()
    if match := _ALONE.fullmatch(text):
        return frozenset(match[1].upper())
    if _LIST.fullmatch(text):
        return frozenset(text.replace("and", "").upper()) - set(", &\t\n")
    if _JOINED.fullmatch(text) and list(text) == sorted(set(text)):
        return frozenset(text)
    if match := _WITH_TEXT.fullmatch(text):
        return frozenset((match[1] or match[2]).upper())
    return None


multiple_choice = MultipleChoice()
"""The built-in reward `multiple_choice`."""
