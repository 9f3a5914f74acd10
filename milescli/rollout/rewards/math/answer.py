r"""Parses an answer: a value, text, several values, an interval, a matrix or a relation. Reads text
that `spelling` has normalised; `equality` compares the results. Needs no algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from milescli.rollout.rewards.math.numbers import number_of, without_unit
from milescli.rollout.rewards.math.spelling import WORD, normalized, trimmed

MAX_DEPTH = 20
MAX_ITEMS = 200
"""Largest number of items of an answer; a longer list is no answer."""


class Contradiction(ValueError):
    """Reports a text that states something impossible, like 8 = 7, or nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Holds one value."""

    text: str
    """An expression, without name and unit."""
    number: Fraction | None = None
    """The exact value, if the text is a plain number."""
    num_decimals: int | None = None
    """Number of decimals, if the number was written with decimals."""
    unit: str | None = None
    name: str | None = None
    """The variable of which it is the value: x in x = 5."""
    equation: tuple[str, str] | None = None
    """Both sides, if it was written as an equation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Holds words."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """Holds more than one answer, in no order: 7 or 8; 1, 2; {1, 2}; plus-minus 3."""

    items: tuple[Answer, ...]
    is_set: bool = False
    """True if equal items count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracketed:
    """Holds a tuple, a vector or an interval: the order counts, and the brackets if there are
    two."""

    opens: str
    items: tuple[Answer, ...]
    closes: str
    is_inequality: bool = False
    """True if it was written as an inequality: x > 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Union:
    """Holds sets in no order."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Holds rows of entries."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Holds an equation, or an inequality that is no interval of one variable."""

    left: str
    sign: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Holds 3:4, 1:2:3, or a time of day: 4:30 pm."""

    parts: tuple[str, ...]
    half: str | None = None
    """Half of the day: am or pm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Holds a chain x = 3 + 4 = 7, whose sides must all be equal."""

    sides: tuple[Answer, ...]
    name: str | None
    equation: tuple[str, str] | None


Answer = Value | Text | Several | Bracketed | Union | Matrix | Relation | Ratio | Chain

_NAME = re.compile(
    rf"(?:{WORD}?[a-zA-Z]+|\\[a-zA-Z]+)(?:_(?:\w|\{{\w+\}}))?'*(?:\s*\(\s*\w+(?:\s*,\s*\w+)*\s*\))?"
    rf"|\|?[A-Z]{{1,3}}\|?|m?\s*\\(?:angle|triangle|overline)\s*\{{?[A-Z]{{1,3}}\}}?|(?:{WORD}?[a-zA-Z]+\s+){{1,5}}{WORD}?[a-zA-Z]+"
)
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|theta|lambda|phi|mu|sigma|gamma|omega)")
_SENTENCE = re.compile(rf"\A(?:{WORD}[a-zA-Z]+\s+)*{WORD}(?:is|are)\s*:?\s+(?!{WORD})")
_SIGNS = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|\\approx|=|<|>")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_MATRIX = re.compile(
    r"\\begin\{((?:[pbvBV]|small)?matrix|array)\}(?:\{[^}]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_APART = re.compile(r"(?<![_^\d])\d+\s+\d")
_ANGLE_OF = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(?<!\d)(\d++(?:\.\d++)?)\s*\^\\circ")
_BASED = re.compile(r"(\d[0-9A-Fa-f]*)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_CONDITION = re.compile(
    rf"(?<=\S)\s*(?<![a-zA-Z]){WORD}?(?:for\s+{WORD}?(?:any|all|some|every|each)|where)(?![a-zA-Z])"
)
_MODULO = re.compile(
    rf"(.+?)\s*\(?\s*(?:\\[bp]?mod|(?<![a-zA-Z\\]){WORD}?mod(?:ulo)?)\s*\{{?\s*(\d+)\s*\}}?\s*\)?"
)
_PLUS_MINUS = re.compile(r"\\([pm])(?:(?<=p)m|(?<=m)p)(?![a-zA-Z])")
_HALF = re.compile(r"(.*\d)\s*([ap])\.?\s*m\.?", re.IGNORECASE | re.DOTALL)
_FUNCTION = re.compile(
    r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|lim|max|min|gcd|lcm|det|[bp]?mod"
)
_SHORT_WORD = re.compile(r"yes|no|true|false|odd|even|none|all", re.IGNORECASE)


def read(text: str) -> Answer:
    """Parse the text. Raises Contradiction if it is no answer: empty, or endless."""
    return _read(normalized(text), 0)


def split(text: str, separator: str) -> list[str]:
    """Split the text at each match outside of all brackets."""
    pattern, parts, depth, start, place = re.compile(separator), list[str](), 0, 0, 0
    while place < len(text):
        if depth == 0 and (match := pattern.match(text, place)) and match.end() > place:
            parts.append(text[start:place])
            start = place = match.end()
            continue
        sign = text[place]
        if sign == "\\":
            if text.startswith((r"\begin", r"\{", r"\langle"), place):
                depth += 1
            elif text.startswith((r"\end", r"\}", r"\rangle"), place):
                depth = max(0, depth - 1)
            place += 2
            continue
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth = max(0, depth - 1)
        place += 1
    return [*parts, text[start:]]


def _read(text: str, depth: int) -> Answer:
    text = trimmed(text)
    if not text or depth > MAX_DEPTH:
        raise Contradiction("it is empty, or nested without end")
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in split(matrix[2], r"\\\\(?:\s*\[[^\]]*\])?") if row.strip()]
        cells = [tuple(_read(cell, depth + 1) for cell in split(row, "&")) for row in rows]
        return Matrix(rows=tuple(cells))
    if text[:1] in ("(", "[") and (matrix := _MATRIX.fullmatch(text[1:-1].strip())):
        return _read(matrix[0], depth + 1)
    text = _without_condition(_SENTENCE.sub("", text))
    if len(parts := _several(text)) > 1:
        return Several(items=tuple(_read(part, depth + 1) for part in parts))
    if len(parts := split(text, r"\\cup(?![a-zA-Z])")) > 1:
        return Union(parts=tuple(_read(part, depth + 1) for part in parts))
    if len(parts := split(text, r"\\in(?![a-zA-Z])")) == 2:
        return _read(parts[1], depth + 1)
    signs = _SIGNS.findall(_flat(text))
    if signs and len(parts := split(text, _SIGNS.pattern)) == len(signs) + 1:
        return _related(parts, signs, depth)
    return _bracketed(text, depth) or _value(text, depth)


def _without_condition(text: str) -> str:
    """Return a formula without the condition on its constants: `x + c` of `x + c for any constant
    c`."""
    head = _CONDITION.split(text, maxsplit=1)[0]
    return text if _is_text(head) or not head.strip() else head.strip().rstrip(",;")


def _several(text: str) -> list[str]:
    parts = split(text, rf"[,;]|(?<![a-zA-Z]){WORD}?(?:and|or)(?![a-zA-Z])")
    parts = [part for part in parts if part.strip()]  # `7, and 8`
    if len(parts) > MAX_ITEMS:
        raise Contradiction("it is a list without end")
    return parts


def _flat(text: str) -> str:
    """Return the text outside of brackets."""
    parts, rest = [], split(text, _SIGNS.pattern)
    place = 0
    for part in rest[:-1]:
        place += len(part)
        match = _SIGNS.match(text, place)
        assert match is not None, (text, place)
        parts.append(match[0])
        place = match.end()
    return " ".join(parts)


def _related(parts: list[str], signs: list[str], depth: int) -> Answer:
    parts = [part.strip() for part in parts]
    if r"\approx" in signs:
        exact = [part for part in parts[: signs.index(r"\approx") + 1] if part]
        signs = signs[: signs.index(r"\approx")]
        parts = exact or parts[1:2]
        if not signs:
            return _read(parts[0], depth + 1)
    if set(signs) != {"="}:
        return _inequality(parts, signs, depth)
    if parts[0] == "":  # `= 7`
        parts = parts[1:]
    if len(parts) == 2 and _is_name(parts[1]) and not _is_name(parts[0]):
        parts.reverse()
    name = parts[0] if len(parts) > 1 and _is_name(parts[0]) else None
    values = parts[1:] if name else parts
    if not all(parts):
        raise Contradiction("a side of its equation is empty")
    if name is None and len(values) == 2 and _has_variable("".join(values)):
        return Relation(left=values[0], sign="=", right=values[1])
    return Chain(
        sides=tuple(_read(value, depth + 1) for value in values),
        name=name and normalized_words(name),
        equation=(name, values[-1]) if name else None,
    )


def _inequality(parts: list[str], signs: list[str], depth: int) -> Answer:
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[1]) and signs[0] in _TURNED:
        parts, signs = parts[::-1], [_TURNED[signs[0]]]
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[0]) and signs[0] in _TURNED:
        infinite = Value(text=r"\infty") if signs[0] in (">", r"\ge") else Value(text=r"-\infty")
        end = _read(parts[1], depth + 1)
        if signs[0] in (">", r"\ge"):
            return _interval([end, infinite], ["<" if signs[0] == ">" else r"\le", "<"])
        return _interval([infinite, end], ["<", signs[0]])
    if len(parts) == 3 and _VARIABLE.fullmatch(parts[1]):
        if all(sign in (">", r"\ge") for sign in signs):
            parts, signs = parts[::-1], [_TURNED[sign] for sign in signs[::-1]]
        if all(sign in ("<", r"\le") for sign in signs):
            return _interval([_read(part, depth + 1) for part in parts[::2]], signs)
    if len(parts) == 2 and all(parts):
        return Relation(left=parts[0], sign=signs[0], right=parts[1])
    raise Contradiction("its chain of relations is none of one variable")


def _interval(ends: list[Answer], signs: list[str]) -> Bracketed:
    """Make low < x <= high from its ends and its two signs."""
    return Bracketed(
        opens="(" if signs[0] == "<" else "[",
        items=tuple(ends),
        closes=")" if signs[1] == "<" else "]",
        is_inequality=True,
    )


def _bracketed(text: str, depth: int) -> Answer | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        if not inner.strip():
            return Several(items=(), is_set=True)
        if r"\mid" in inner or ":" in inner or "|" in inner:
            return Value(text=text)
        parts = [part for part in split(inner, "[,;]") if part.strip()]
        return Several(items=tuple(_read(part, depth + 1) for part in parts), is_set=True)
    if text == r"\emptyset":
        return Several(items=(), is_set=True)
    text = re.sub(r"^\\langle(.*)\\rangle$", r"(\1)", text)
    if text[0] not in "([" or text[-1] not in ")]" or _end_of(text) != len(text) - 1:
        return None
    parts = split(text[1:-1], "[,;]")
    if len(parts) == 1:
        return _read(text[1:-1], depth + 1) if (text[0], text[-1]) == ("(", ")") else None
    if len(parts) > MAX_ITEMS:
        raise Contradiction("it is a list without end")
    items = tuple(_read(part, depth + 1) for part in parts)
    return Bracketed(opens=text[0], items=items, closes=text[-1])


def _end_of(text: str) -> int:
    """Return where the first bracket of the text closes, with a bracket of any kind: (1,2] is an
    interval."""
    depth = 0
    for place, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                return place
    return -1


def _value(text: str, depth: int) -> Answer:
    if _PLUS_MINUS.search(text):
        both = [
            _PLUS_MINUS.sub(lambda m, s=s: f" {s[m[1]]}", text)
            for s in ({"p": "+", "m": "-"}, {"p": "-", "m": "+"})
        ]
        return Several(items=tuple(_value(trimmed(one).lstrip("+ "), depth) for one in both))
    if match := _MODULO.fullmatch(text):
        number, modulus = number_of(match[1]), int(match[2])
        if number is None or number.value.denominator != 1 or modulus == 0:
            return Value(text=match[1], unit=f"mod {modulus}")
        rest = number.value % modulus
        return Value(text=str(rest), number=Fraction(rest), unit=f"mod {modulus}")
    if (parted := _ratio(text)) is not None:
        return parted
    if match := _BASED.fullmatch(text):
        return Text(text=f"{match[1].lower().lstrip('0')} in base {match[2] or match[3]}")
    if _ANGLE_OF.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    amount, unit = without_unit(text)
    number = number_of(amount)
    if number is not None:
        return Value(text=amount, number=number.value, num_decimals=number.num_decimals, unit=unit)
    if _is_text(amount) or _APART.search(amount):
        return Text(text=normalized_words(text))
    return Value(text=amount, unit=unit)


def _ratio(text: str) -> Ratio | None:
    if ":" not in text or "|" in text or r"\to" in text:
        return None
    half = _HALF.fullmatch(text.replace(WORD, ""))
    parts = [part.strip() for part in split(half[1] if half else text, ":")]
    if len(parts) < 2 or not all(parts) or any(map(_is_text, parts)):
        return None
    return Ratio(parts=tuple(parts), half=half[2].lower() + "m" if half else None)


def _is_text(text: str) -> bool:
    if WORD in text:
        return True
    words = re.findall(r"(?<![\\a-zA-Z])[^\W\d_]+", re.sub(r"\\[a-zA-Z]+", " ", text))
    return any(
        not _FUNCTION.fullmatch(word) and (len(word) > 3 or _SHORT_WORD.fullmatch(word))
        for word in words
    )


def normalized_words(text: str) -> str:
    """Return words in the form in which they are compared: without case and punctuation."""
    return " ".join(re.sub(r"[^\w\s+\-*/^]", " ", text.replace(WORD, "")).casefold().split())


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text.strip()) is not None and number_of(text) is None


def _has_variable(text: str) -> bool:
    return re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+|sqrt", "", text)) is not None
