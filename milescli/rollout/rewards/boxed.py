"""Finds the last result that a response puts in a box. Pure text, no mathematics; used by the
`math` reward's processes."""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r"""(?P<box> \\ (?:boxed|fbox) \s* \{ )
      | \\\\ (?! boxed | fbox )   # a line break, not the escape of a brace behind it
      | \\ [{}]                   # an escaped brace stands for itself
      | [{}]
    """,
    re.VERBOSE,
)
_BOX_OPENS = re.compile(r"\\(?:boxed|fbox)\s*\{")


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
