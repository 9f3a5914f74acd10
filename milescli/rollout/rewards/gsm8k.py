"""The grader of GSM8K: compares the number after the last `####` of the answer with that of the
label."""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"

_NUMBER = re.compile(
    r"""[ \t]*
        (?P<sign>-)? [ ]* \$? (?P<sign_after>-)?
        (?P<digits> \d{1,3}(?:,\d{3})+ | \d+ | (?=\.\d) )
        (?P<decimals>\.\d+)?
        (?! [\w/^*] | [.,]\d )   # not the head of 1,2 or 1.2.3 or 3/4 or 10^3 or 7e3
    """,
    re.VERBOSE | re.ASCII,
)


def gsm8k(*, prompt: str, response: str, label: str | None) -> float:
    """1.0 where the answer states the label's number, else 0.0.

    Label: the number after its last `####`, or the whole label where it has none. Answer: only what
    stands on the same line directly after its *last* `####` counts; a number elsewhere never does,
    so an answer without `####` scores 0.0. There the first number is read and the rest of the line
    ignored (`#### 72 clips`, `#### 72.`, `#### 50%`). Numbers may have a sign, a `$`, commas
    between groups of three digits and decimals, and are compared by value: `$1,234.00` equals
    `1234`. Fractions, exponents and stray commas are no numbers. Raises ValueError where the label
    holds no number: the data is at fault, not the answer.
    """
    wanted = None if label is None else _number(label.rpartition(MARK)[2])
    if wanted is None:
        raise ValueError(f"the label holds no number: {label!r}")
    _, mark, rest = response.rpartition(MARK)
    return float(bool(mark) and _number(rest) == wanted)


def _number(text: str) -> Decimal | None:
    found = _NUMBER.match(text)
    if found is None:
        return None
    value = Decimal((found["digits"] or "0").replace(",", "") + (found["decimals"] or ""))
    return -value if bool(found["sign"]) != bool(found["sign_after"]) else value
