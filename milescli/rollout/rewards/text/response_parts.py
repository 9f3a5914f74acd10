"""Parts of a response that rewards compare: its last box, what its tags enclose, its thinking, its
answer. Pure text, no mathematics."""

from __future__ import annotations

import json
import re

OPENS_THINKING, ENDS_THINKING = "<think>", "</think>"
_OPENS_ANSWER, _ENDS_ANSWER = "<answer>", "</answer>"
_TOKENS = re.compile(
    r"""(?P<box> \\ (?:boxed|fbox) \s* \{ )
      | \\\\ (?! boxed | fbox )   # a line break, not the escape of a brace behind it
      | \\ [{}]                   # an escaped brace stands for itself
      | [{}]
    """,
    re.VERBOSE,
)
_BOX_OPENS = re.compile(r"\\(?:boxed|fbox)\s*\{")


def part_of(response: str, where: str) -> str | None:
    r"""The part that is compared; None where it is not there. `where`: whole, tags (the last
    `<answer>...</answer>`), boxed (the last `\boxed{}`) or last_line (the last with a word)."""
    if where == "tags":
        before, closes, _ = response.rpartition(_ENDS_ANSWER)
        _, opens, inner = before.rpartition(_OPENS_ANSWER)
        return inner.strip() if closes and opens else None
    if where == "boxed":
        return last_boxed(response)
    if where == "last_line":
        return response.strip().rpartition("\n")[2].strip()
    return response.strip()


def after_thinking(response: str) -> str | None:
    """What follows the one `</think>`; None where thinking is not closed once, is opened elsewhere
    than at the start, or is empty."""
    text = response.strip()
    thought, closes, rest = text.partition(ENDS_THINKING)
    thought = thought.removeprefix(OPENS_THINKING)
    is_once = ENDS_THINKING not in rest and OPENS_THINKING not in thought + rest
    return rest.strip() if closes and is_once and thought.strip() else None


def texts_of(label: str) -> list[str]:
    """The texts that are right: those of a JSON list of texts, or the label itself."""
    if label.lstrip().startswith("["):
        try:
            listed = json.loads(label)
        except ValueError:
            return [label]
        if listed and all(isinstance(text, str) for text in listed):
            return listed
    return [label]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{}` or `\fbox{}` that holds anything, boxes within
    it opened; None where there is none.

    A box whose brace never closes, or with nothing in it, is no result: `\boxed{7}, as asked in
    \boxed{}` states 7. One pass over the text, whatever its braces.
    """
    open_braces: list[int | None] = []  # where a box's content begins; None: a plain brace
    last = None
    for token in _TOKENS.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (content := _opened(text[start : token.start()])):
                last = content
    return last


def _opened(content: str) -> str:
    opened = _BOX_OPENS.sub("{", content).strip()
    return opened if opened.strip("{} \t\n") else ""
