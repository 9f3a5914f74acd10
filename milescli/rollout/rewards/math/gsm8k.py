"""The grader of GSM8K: compares the number after the last `####` of the response with that of the
label."""

from __future__ import annotations

import re
from decimal import Decimal

from milescli.rollout.rewards.extraction import MARK, after_thinking, last_boxed, marked_answers

_NUMBER = re.compile(
    r"""[ \t]*
        (?P<sign>-)? [ ]* \$? (?P<sign_after>-)?
        (?P<digits> \d{1,3}(?:,\d{3})+ | \d+ | (?=\.\d) )
        (?P<decimals>\.\d+)?
        (?! [\w/^*] | [.,]\d )   # not the head of 1,2 or 1.2.3 or 3/4 or 10^3 or 7e3
    """,
    re.VERBOSE | re.ASCII,
)


class Gsm8k:
    r"""Returns 1.0 if the response states the label's number, else 0.0.

    The label's number is the one after its last `####`; without `####`, the whole label. In the
    response, only the text directly after its *last* `####` counts; thinking and headings (`####
    Step 2` with text below) are skipped. A response without `####` scores 0.0. The first number
    after it is read, also in bold, in a box or after `Answer:`, and the rest of the line is ignored
    (`#### 72 clips`, `#### **72**`, `#### 50%`). Numbers may have a sign, a `$`, commas between
    groups of three digits and decimals, and are compared by value: `$1,234.00` equals `1234`.
    Fractions, exponents and other commas are no numbers. Raises ValueError if the label has no
    number, which is an error of the data.

    >>> score(label="So 8 * 9 = 72 #### 72", response="#### 72 clips")
    1.0
    >>> score(label="1234", response="#### **$1,234.00**")
    1.0
    >>> score(label="72", response="#### Step 1\n8 * 9\n#### 72")
    1.0
    >>> score(label="72", response="The answer is 72.")
    0.0
    >>> score(label="72", response="#### 72, no: #### 71")
    0.0
    >>> score(label="3", response="#### 3/4")
    0.0
    """

    needs_label = True

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes. Raises ValueError if the label has no
        number."""
        wanted = None if label is None else _of_label(label)
        if wanted is None:
            raise ValueError(f"the label does not contain a number: {label!r}")
        return float(_stated(response) == wanted)

    def answer(self, response: str) -> str | None:
        """Return the number that is compared, in one spelling; None if none is stated."""
        number = _stated(response)
        return None if number is None else f"{number.normalize():f}"

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct, or None."""
        if label is None:
            return "`gsm8k` needs a label"
        return "it holds no number" if _of_label(label) is None else None


def _of_label(label: str) -> Decimal | None:
    return _number(MARK.split(label)[-1])


def _stated(response: str) -> Decimal | None:
    line = next(marked_answers(after_thinking(response)), "")
    return _number(last_boxed(line) or line.lstrip("$("))


def _number(text: str) -> Decimal | None:
    match = _NUMBER.match(text)
    if match is None:
        return None
    value = Decimal((match["digits"] or "0").replace(",", "") + (match["decimals"] or ""))
    return -value if bool(match["sign"]) != bool(match["sign_after"]) else value


gsm8k = Gsm8k()
"""The built-in reward `gsm8k`."""
