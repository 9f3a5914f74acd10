"""The reward `multiple_choice`: compares the letter, or the letters, that a response chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from milescli.rollout.rewards.extraction import (
    after_thinking,
    answer_in_json,
    last_boxes,
    marked_answers,
    sentences_that_answer,
    tagged_answer,
    without_markdown,
)

_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|\\[()\[\]]|[*_`$]")
_OPTION = r"(?:the\s+)?(?:options?|choices?|answers?|letters?)"
_LETTER = r"\(?\[?([A-Za-z])\]?\)?"
_ALONE = re.compile(rf"(?:{_OPTION})?\s*[:：]?\s*{_LETTER}\s*[.:)：]?", re.IGNORECASE)  # noqa: RUF001
_WITH_TEXT = re.compile(
    rf"(?:{_OPTION})?\s*(?:\(([A-Za-z])\)\s*|([A-Za-z])\s*(?:[.:)：,]|[-–—](?=\s))\s*)(?=\S).*",  # noqa: RUF001
    re.I | re.S,
)
_CHOOSES = re.compile(
    rf"\b(?:{_OPTION}\s+)?\(?([A-Z])\)?(?:[.:)][^.\n]{{1,80}}?)?\s+"
    r"(?:is|would be|must be)\s+(?:the\s+)?(?:only\s+)?(?:best|right|correct)\b"
)
_SENTENCE = re.compile(r"[^.\n]+")
_RIGHT = re.compile(r"\b(?:best|right|correct)\b")
_LEADS = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|clearly|it(?:['’]s| is)|i(?:['’]d| would| will)?\s+"  # noqa: RUF001
    r"(?:choose|pick|select|say|go with|go for))\b[\s,:]*)+",
    re.IGNORECASE,
)
_LIST = re.compile(r"[A-Za-z](?:\s*(?:,\s*and\b|,|&|\band\b)\s*[A-Za-z])+")
_JOINED = re.compile(r"[A-J]{2,}")
_SAID = re.compile(
    r"\b(?:choices?|options?)\s*(?:is|are|[:：]|would be|must be)\s*[:：]?\s*",  # noqa: RUF001
    re.IGNORECASE,
)
_ENDS = re.compile(r"(?<=\S)[.!?。](?:\s|$)|\n|,?\s(?:because|since|as|so)\b")
_DENIES = re.compile(r"\b(?:not|neither|nor|isn't|wrong|incorrect|false)\b", re.IGNORECASE)
_HEADING = re.compile(r"^[ \t]*#{1,6}[ \t]+(.+)$", re.MULTILINE)


class MultipleChoice:
    r"""Returns 1.0 if the response chooses the label's letter, else 0.0.

    The label is a letter, also as `(B)`, `B.` or `B) Paris`, or several letters, `A, C`, which must
    all be chosen. The response's choice is the first of these that it has: its last `\boxed{}`, its
    last `<answer>`, the `answer` of its JSON, the text after its last `####`, the text that it
    names as the answer ("the answer is", "Answer:"), the option that it calls correct ("option B is
    correct"), a heading that is a letter, its last line, its first line. The letter must be alone
    there or before its text (`B`, `(b)`, `**B**`, `\(B\)`, `B) Paris`, `B, Paris.`, `option B`).
    The article `A` is no choice, and `A or B` chooses nothing. Thinking does not count.

    >>> score(label="B", response="Option B is correct, as it is the capital.")
    1.0
    >>> score(label="B) Paris", response=r"The answer is \(B\).")
    1.0
    >>> score(label="A, C", response="Answer: C and A")
    1.0
    >>> score(label="B", response='{"answer": "b"}')
    1.0
    >>> score(label="A", response="A capital is a city.")
    0.0
    >>> score(label="B", response="A or B")
    0.0
    >>> score(label="A, C", response="A")
    0.0
    """

    needs_label = True
    examples = (("Which?", "The answer is B.", "B"), ("Which?", "A or B", "B"), ("", "", "A, C"))

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Return 1.0 or 0.0. Raises ValueError if the label is no letter."""
        wanted = None if label is None else _letters(label)
        if wanted is None:
            raise ValueError(f"the label is not a letter: {label!r}")
        return float(_chosen(response) == wanted)

    def answer(self, response: str) -> str | None:
        """Return the chosen letters in order; None if the response chooses none."""
        return "".join(sorted(_chosen(response) or "")) or None

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be right; None: one can."""
        if label is None:
            return "`multiple_choice` needs a label"
        return "it is not a letter" if _letters(label) is None else None


def _chosen(response: str) -> frozenset[str] | None:
    """Return the letters that the response chooses; None if it chooses none."""
    text = after_thinking(response).strip()
    for stated in (last_boxes(text), tagged_answer(text), answer_in_json(text)):
        if stated is not None:
            return _letters(stated) or _stated_choice(stated)
    if (marked := next(marked_answers(text), None)) is not None:
        return _letters(marked)
    return next((found for found in _sentences(text) if found), None)


def _sentences(text: str) -> Iterator[frozenset[str] | None]:
    """Yield the choices of the sentences that may state one, in order of priority."""
    headings = [_letters(heading[1]) for heading in _HEADING.finditer(text)]
    plain = _HEADING.sub(r"\1", without_markdown(text)).strip()
    yield _stated_choice(plain)
    if chooses := list(_CHOOSES.finditer(_SENTENCE.sub(_without_question, plain))):
        yield None if _DENIES.search(chooses[-1][0]) else frozenset(chooses[-1][1])
    yield next((letters for letters in reversed(headings) if letters), None)
    first, _, below = plain.partition("\n")
    yield _letters(plain.rpartition("\n")[2])
    yield _letters(first) if below else None


def _without_question(sentence: re.Match[str]) -> str:
    """Return a sentence in which nothing before a question mark is called correct; as long as
    before."""
    asked, mark, rest = sentence[0].rpartition("?")
    return _RIGHT.sub(lambda word: "_" * len(word[0]), asked) + mark + rest


def _stated_choice(text: str) -> frozenset[str] | None:
    """Return the choice after the last place that names the answer, the choice or the option."""
    named = list(sentences_that_answer(text))
    named += [text[match.end() :][:2000] for match in list(_SAID.finditer(text))[-20:][::-1]]
    for after in named:
        after = _WRAPPED.sub(_keep_word, after).strip()
        if not after:
            continue
        if _WITH_TEXT.match(after):
            return _letters(after.partition("\n")[0])
        sentence = _ENDS.split(after, maxsplit=1)[0]
        if (letters := _letters(sentence)) is not None or len(sentence.split()) > 1:
            return letters
    return None


def _keep_word(match: re.Match[str]) -> str:
    return match[1] or ""


def _letters(text: str) -> frozenset[str] | None:
    """Return the letters of a text; None if it chooses none, or is ambiguous."""
    text = _WRAPPED.sub(_keep_word, text).strip()
    if lead := _LEADS.match(text):
        text = text[lead.end() :]
    text = text.strip("\"'“”").rstrip(".。").strip()
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
