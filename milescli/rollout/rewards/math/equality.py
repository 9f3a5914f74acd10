r"""Compares two answers: structures part by part, plain numbers exactly, everything else by algebra
(math-verify's parser, SymPy). Runs in the `math` reward's processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from milescli.rollout.rewards.math.algebra import MIN_DECIMALS, equal_expressions, ratio
from milescli.rollout.rewards.math.answer import (
    Answer,
    Bracketed,
    Chain,
    Contradiction,
    Matrix,
    Ratio,
    Relation,
    Several,
    Text,
    Union,
    Value,
    normalized_words,
    read,
)

_POINTS = re.compile(
    r"(?:\\(?:triangle|angle|overline|vec|overrightarrow)\s*)?\{?\s*[A-Z]{2,}\s*\}?"
)
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def parse_answer(text: str) -> Answer:
    """Return the answer that the text states. Raises Contradiction if it cannot be true, like 8 =
    7."""
    return _without_contradiction(read(text))


def _without_contradiction(answer: Answer) -> Answer:
    if isinstance(answer, Chain):
        sides = [_without_contradiction(side) for side in answer.sides]
        if not all(equal(side, sides[-1]) for side in sides[:-1]):
            raise Contradiction("its sides are not equal")
        last = sides[-1]
        if answer.name and isinstance(last, Value):
            return replace(last, name=answer.name, equation=answer.equation)
        return last
    if isinstance(answer, Several):
        items = tuple(_without_contradiction(item) for item in answer.items)
        return Several(items=_named_alike(items), is_set=answer.is_set)
    if isinstance(answer, Bracketed):
        return replace(answer, items=tuple(_without_contradiction(item) for item in answer.items))
    if isinstance(answer, Union):
        return Union(parts=tuple(_without_contradiction(part) for part in answer.parts))
    if isinstance(answer, Matrix):
        return Matrix(
            rows=tuple(tuple(_without_contradiction(cell) for cell in row) for row in answer.rows)
        )
    return answer


def _named_alike(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Drop the names if all items are values of one variable (x = 1, x = 2), as they do not
    distinguish them."""
    names = {item.name for item in items if isinstance(item, Value)}
    if len(names - {None}) != 1:
        return items
    return tuple(
        replace(item, name=None, equation=None) if isinstance(item, Value) else item
        for item in items
    )


def equal(one: Answer, other: Answer) -> bool:
    """Return True if the answers are equal. Symmetric."""
    one, other = _single(one), _single(other)
    if isinstance(one, Value) and isinstance(other, Value):
        return _equal_values(one, other)
    if isinstance(one, Ratio) or isinstance(other, Ratio):
        return _equal_ratios(one, other)
    if isinstance(one, Several) and isinstance(other, Several):
        is_set = one.is_set or other.is_set
        return _same_in_any_order(_items(one, is_set), _items(other, is_set))
    if isinstance(one, Bracketed) and isinstance(other, Bracketed):
        alike = (one.opens, one.closes) == (other.opens, other.closes)
        return (alike or len(one.items) > 2) and _same_in_order(one.items, other.items)
    if isinstance(one, Union) and isinstance(other, Union):
        return _same_in_any_order(one.parts, other.parts)
    if isinstance(one, Several) and isinstance(other, Bracketed):
        return _are_coordinates(one, other)
    if isinstance(one, Bracketed) and isinstance(other, Several):
        return _are_coordinates(other, one)
    if isinstance(one, Several) and isinstance(other, Union):
        one, other = other, one
    if isinstance(one, Union) and isinstance(other, Several):
        are_intervals = all(isinstance(i, Bracketed) and i.is_inequality for i in other.items)
        return are_intervals and _same_in_any_order(one.parts, other.items)
    if isinstance(one, Matrix) and isinstance(other, Matrix):
        return len(one.rows) == len(other.rows) and all(
            _same_in_order(row, other_row)
            for row, other_row in zip(one.rows, other.rows, strict=True)
        )
    if isinstance(one, Text) and isinstance(other, Text):
        return one.text == other.text
    if isinstance(one, Text | Value) and isinstance(other, Text | Value):
        if _has_letters(one.text) and normalized_words(one.text) == normalized_words(other.text):
            return True  # `May 5` is read as a value, but \text{May 5} as words
        letters = _letters(one.text)
        return letters.isalpha() and letters == _letters(other.text)
    return _equal_relations(one, other)


def _has_letters(text: str) -> bool:
    return any(sign.isalpha() for sign in text)


def _are_coordinates(named: Several, tuple_: Bracketed) -> bool:
    """Return True if named values equal a tuple, names in alphabetical order: x = 2, y = 3 and (2,
    3)."""
    names = [item.name for item in named.items if isinstance(item, Value) and item.name]
    if (tuple_.opens, tuple_.closes) != ("(", ")") or len(set(names)) != len(named.items):
        return False
    ordered = [item for _, item in sorted(zip(names, named.items, strict=True), key=_first)]
    return _same_in_order(ordered, tuple_.items)


def _first(pair: tuple[str, Answer]) -> str:
    return pair[0]


def _equal_ratios(one: Answer, other: Answer) -> bool:
    """Compare times of day by hour and minute, other ratios up to a factor; 2:1 is 2."""
    if isinstance(other, Value):
        one, other = other, one
    if isinstance(one, Value) and isinstance(other, Ratio):
        is_ratio = len(other.parts) == 2 and not other.half and not one.unit
        return is_ratio and equal_expressions(
            _algebra_text(one), rf"\frac{{{other.parts[0]}}}{{{other.parts[1]}}}"
        )
    if not isinstance(one, Ratio) or not isinstance(other, Ratio):
        return False
    if len(one.parts) != len(other.parts):
        return False
    if one.parts == other.parts:
        return not (one.half and other.half) or one.half == other.half
    if (clock := _clock(one)) and (other_clock := _clock(other)):
        return bool(clock & other_clock)
    return all(
        equal_expressions(rf"\frac{{{a}}}{{{one.parts[0]}}}", rf"\frac{{{b}}}{{{other.parts[0]}}}")
        for a, b in zip(one.parts[1:], other.parts[1:], strict=True)
    )


def _clock(ratio_: Ratio) -> set[tuple[int, int]]:
    """Return the times of day that the ratio may mean, on a 24-hour clock; none if it is no
    time."""
    hour, minute = (*ratio_.parts, "")[:2]
    if len(ratio_.parts) != 2 or not (hour.isdecimal() and minute.isdecimal()):
        return set()
    if len(hour) > 2 or len(minute) != 2 or int(hour) > 24 or int(minute) > 59:
        return set()
    morning = int(hour) % 12
    if ratio_.half:
        return {(morning + (12 if ratio_.half == "pm" else 0), int(minute))}
    return {(int(hour), int(minute))}


def _single(answer: Answer) -> Answer:
    """Return the item of a one-element set; turn all real numbers into an interval."""
    if isinstance(answer, Several) and len(answer.items) == 1:
        return answer.items[0]
    if isinstance(answer, Value) and answer.text.strip() in (r"\mathbb{R}", r"\Bbb{R}"):
        ends = Value(text=r"-\infty"), Value(text=r"\infty")
        return Bracketed(opens="(", items=ends, closes=")")
    return answer


def _letters(text: str) -> str:
    """Return the letters and digits: (B) and B are one choice; words are compared without case."""
    letters = "".join(sign for sign in text if sign.isalnum())
    return letters.casefold() if len(letters) > 1 else letters


def _items(several: Several, is_set: bool) -> Sequence[Answer]:
    if not is_set:
        return several.items
    different = list[Answer]()
    for item in several.items:
        if not any(equal(item, seen) for seen in different):
            different.append(item)
    return different


def _same_in_any_order(ones: Sequence[Answer], others: Sequence[Answer]) -> bool:
    left = list(others)
    for one in ones:
        place = next((place for place, other in enumerate(left) if equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_in_order(ones: Sequence[Answer], others: Sequence[Answer]) -> bool:
    return len(ones) == len(others) and all(map(equal, ones, others))


def _equal_values(one: Value, other: Value) -> bool:
    if one.name and other.name and one.name != other.name:
        return _equal_relations(one, other)
    if "%" in (one.unit, other.unit) and one.unit != other.unit:
        percent, bare = (one, other) if one.unit == "%" else (other, one)
        if bare.unit is not None:
            return False
        if percent.number is not None and bare.number is not None:
            return bare.number in (percent.number, percent.number / 100)
        return _equal_texts(percent, bare)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    return _equal_texts(one, other)


def _equal_texts(one: Value, other: Value) -> bool:
    if one.number is not None and other.number is not None:
        return one.number == other.number or _rounds_to(one, other) or _rounds_to(other, one)
    if "".join(one.text.split()) == "".join(other.text.split()):
        return True
    if _POINTS.fullmatch(one.text.strip()) and _POINTS.fullmatch(other.text.strip()):
        return False  # AB and BA are names, no products
    places = {one.num_decimals, other.num_decimals} - {None}
    return equal_expressions(
        _algebra_text(one), _algebra_text(other), num_decimals=min(places, default=None)
    )


def _algebra_text(value: Value) -> str:
    """Return the value as algebra parses it."""
    if value.number is None:
        return value.text
    return f"\\frac{{{value.number.numerator}}}{{{value.number.denominator}}}"


def _rounds_to(decimal: Value, exact: Value) -> bool:
    """Return True if a long decimal is the rounding of a number that is no decimal itself."""
    places = decimal.num_decimals
    if places is None or places < MIN_DECIMALS or exact.num_decimals is not None:
        return False
    assert decimal.number is not None and exact.number is not None
    return abs(decimal.number - exact.number) * 10**places <= Fraction(1, 2)


def _equal_relations(one: Answer, other: Answer) -> bool:
    if isinstance(one, Value) and one.equation:
        one = Relation(left=one.equation[0], sign="=", right=one.equation[1])
    if isinstance(other, Value) and other.equation:
        other = Relation(left=other.equation[0], sign="=", right=other.equation[1])
    if not isinstance(one, Relation) or not isinstance(other, Relation):
        return False
    factor = ratio((one.left, one.right), (other.left, other.right))
    if factor is None:
        return False
    if one.sign in ("=", r"\ne"):
        return one.sign == other.sign
    return other.sign == (one.sign if factor > 0 else _TURNED.get(one.sign))
