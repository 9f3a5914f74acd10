r"""Parses plain numbers exactly: decimals, fractions, mixed and scientific notation, repeating
decimals; and their units. Pure text; `answer` calls it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from milescli.rollout.rewards.math.spelling import WORD

MAX_EXPONENT = 400
"""Largest exponent of ten; beyond it algebra decides, within its bounds."""
MAX_DIGITS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Holds a rational number as it was written."""

    value: Fraction
    num_decimals: int | None = None
    """Number of decimals, if the number was written with decimals that end."""


_DECIMAL = r"\d+(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(rf"({_DECIMAL})(?:[eE]([-+]?\d+))?")
_POWER = re.compile(
    rf"(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|(?<=\s)[xX](?=\s)|(?<=\d)[xX](?=\s*10))\s*)?"
    r"10\s*(?:\^|\*\*)\s*(?:\{\s*(-?\d+)\s*\}|(-?\d+))"
)
_LATEX_FRACTION = r"\\frac\{\s*(-?[\d.]+)\s*\}\{\s*(-?[\d.]+)\s*\}"
_FRACTION = re.compile(rf"{_LATEX_FRACTION}|({_DECIMAL})\s*/\s*({_DECIMAL})")
_MIXED = re.compile(r"(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(\d+)\s+(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))"
)
_AND_SO_ON = re.compile(r"(\d*)\.(\d+)\s*\.\.\.")

_UNITS = {
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "m": "meter metre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram",
    "kg": "kilogram",
    "mg": "milligram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "$": "dollar usd",
    "€": "euro eur",
    "£": "gbp",
    "¥": "yen",
    "%": "percent pct percentage",
    "°": "degree deg",
}
_SYNONYMS = {word: unit for unit, words in _UNITS.items() for word in (unit, *words.split())}
_KNOWN = frozenset({"/", *_UNITS})
_FACTORS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "dozen": 12}
_NO_UNIT = re.compile(r"\b(?:not?|if|but|than|less|more|is|are|about|or|and|at|to)\b")
_CURRENCY = re.compile(r"(-?)\s*(\\\$|€|£|¥|\\pounds?)\s*(.+)", re.DOTALL)
_POWERED = r"(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?"
_UNIT = re.compile(
    rf"(.*?(?:[\d)}}.]|\\pi))\s*((?:(?:{WORD}|(?<=[\s\d]))[a-zA-Z]{{1,}}){_POWERED}"
    rf"(?:\s*(?:/|\\cdot)?\s*{WORD}?[a-zA-Z]+{_POWERED}){{0,3}}|\^\\circ\s*[CF]?|\\?%)",
    re.DOTALL,
)


def number_of(text: str) -> Number | None:
    """Parse a plain number; None if the text is none."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    sign, body = 1, text
    while body[:1] in ("-", "+"):
        sign, body = (-sign if body[0] == "-" else sign), body[1:].lstrip()
    number = _unsigned(body)
    return number and Number(value=sign * number.value, num_decimals=number.num_decimals)


def _unsigned(text: str) -> Number | None:
    if match := _PLAIN.fullmatch(text):
        exponent = int(match[2] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        decimals = len(match[1].partition(".")[2]) - exponent
        is_decimal = "." in match[1] or exponent < 0
        return Number(
            value=Fraction(match[1]) * Fraction(10) ** exponent,
            num_decimals=max(0, decimals) if is_decimal else None,
        )
    if match := _POWER.fullmatch(text):
        exponent = int(match[2] or match[3])
        if abs(exponent) > MAX_EXPONENT:
            return None
        return Number(value=Fraction(match[1] or 1) * Fraction(10) ** exponent)
    if match := _MIXED.fullmatch(text):
        whole, above, below = (int(part) for part in match.groups() if part is not None)
        return Number(value=whole + Fraction(above, below)) if above < below else None
    if match := _FRACTION.fullmatch(text):
        return _fraction(*(part for part in match.groups() if part is not None))
    if match := _REPEATING.fullmatch(text):
        return _repeating(match[1], match[2], match[3] or match[4] or match[5])
    if match := _AND_SO_ON.fullmatch(text):
        return _and_so_on(match[1], match[2])
    return None


def _fraction(above: str, below: str) -> Number | None:
    try:
        return Number(value=Fraction(above) / Fraction(below))
    except (ValueError, ZeroDivisionError):
        return None


def _repeating(whole: str, fixed: str, block: str) -> Number:
    scale, nines = 10 ** len(fixed), 10 ** len(block) - 1
    value = int(whole or 0) + Fraction(int(fixed or 0), scale) + Fraction(int(block), scale * nines)
    return Number(value=value)


def _and_so_on(whole: str, digits: str) -> Number | None:
    """Parse 0.1666...: the shortest block that the digits end with twice repeats for ever; 3.14...
    is no known number."""
    for size in range(1, len(digits) // 2 + 1):
        if digits[-size:] == digits[-2 * size : -size]:
            return _repeating(whole, digits[:-size], digits[-size:])
    return None


def without_unit(text: str) -> tuple[str, str | None]:
    r"""Return the text without its unit, and the unit: `\$36` and `36 dollars` both have `$`. Words
    that multiply (5 million) are no unit."""
    if match := _CURRENCY.fullmatch(text):
        inner, unit = without_unit(match[3].strip())
        sign = match[2].removeprefix("\\").removesuffix("s").replace("pound", "£")
        return match[1] + inner, unit if unit not in (None, sign) else sign
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, None
    unit = _canonical(match[2])
    first, *rest = unit.split() or [""]
    if first in _FACTORS and (number := number_of(match[1])) is not None:
        value = number.value * _FACTORS[first]
        return f"{value.numerator}/{value.denominator}", " ".join(rest) or None
    is_marked = WORD in match[2] or not match[2][0].isalpha()
    # 7 m has a unit; 7m may be a product
    is_apart = match[2][:2].isalpha() or text[match.start(2) - 1] == " "
    is_known = is_apart and all(word.rstrip("^23") in _KNOWN for word in unit.split())
    if _NO_UNIT.search(unit) or not (is_marked or is_known or _is_plain(match)):
        return text, None
    return match[1].strip(), unit


def _is_plain(match: re.Match[str]) -> bool:
    """Return True for a number, a blank and words: `7 apples`, but not `7 x`."""
    words = re.findall(r"[a-zA-Z]+", match[2])
    return number_of(match[1]) is not None and len(words[0]) > 2


def _canonical(text: str) -> str:
    text = re.sub(r"\^\\circ\s*", "°", text.replace(WORD, " ")).replace("\\%", "%").lower()
    text = re.sub(r"\bper\s*cents?\b|\bpercentage\s+points?\b", "percent", text)
    text = re.sub(r"\b(?:square|sq\.?)\s+(\w+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+(\w+)", r"\1^3", text)
    text = re.sub(r"(\w+)\s+squared\b", r"\1^2", re.sub(r"(\w+)\s+cubed\b", r"\1^3", text))
    text = re.sub(r"\bper\b", "/", text.replace("\\cdot", " ").replace(".", " "))
    text = re.sub(r"\s*\^\s*\{?\s*(\d)\s*\}?", r"^\1", text)
    return " ".join(_singular(word) for word in text.replace("/", " / ").split())


def _singular(word: str) -> str:
    base, caret, power = word.partition("^")
    base = _SYNONYMS.get(base) or _SYNONYMS.get(base.removesuffix("s")) or base.removesuffix("s")
    return f"{base}{caret}{power}"
