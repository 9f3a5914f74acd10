"""Reads the tests in a label of the reward `code`: programs with input and output, calls of a
function, or asserts. Pure; used by the reward."""

from __future__ import annotations

import ast
import builtins
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milescli.core.files import parse_json
from milescli.rollout.rewards.code.asserts import (
    SplitAsserts,
    Ungradable,
    names_assigned,
    names_read,
    split_asserts,
)

TOLERANCE = 1e-6
"""Relative and absolute tolerance of numbers with decimals."""
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Holds tests of whole programs."""

    inputs: list[str]
    outputs: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Holds tests that call one function, or a method of `Solution`."""

    name: str
    inputs: list[list[Any]]
    """The arguments of each call."""
    outputs: list[Any]
    texts: list[str | None]
    """Outputs that the label writes as text: the text itself is right, too (TACO), not only the
    JSON in it (LiveCodeBench)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserts:
    """Holds tests made of assert statements."""

    split: SplitAsserts


Tests = Programs | Calls | Asserts


def read_label(label: str | None) -> Tests:
    """Parse the label. Raises Ungradable if no response could be right."""
    if label is None:
        raise Ungradable("`code` needs a label")
    try:
        read = parse_json(label)
    except ValueError as error:
        raise Ungradable(f"it is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise Ungradable(f"it is a {type(read).__name__}, not a JSON object")
    if "asserts" in read:
        return Asserts(split=split_asserts(_texts(read["asserts"], "asserts")))
    inputs, outputs = (_listed(read.get(name), name) for name in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise Ungradable(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if not read.get("fn_name"):
        return Programs(inputs=_texts(inputs, "inputs"), outputs=_texts(outputs, "outputs"))
    if not isinstance(read["fn_name"], str) or not read["fn_name"].isidentifier():
        raise Ungradable(f"`fn_name` is not a name: {read['fn_name']!r}")
    calls = [_arguments(one) for one in inputs]
    return Calls(
        name=read["fn_name"],
        inputs=calls,
        outputs=[_value(one) for one in outputs],
        texts=[one if isinstance(one, str) else None for one in outputs],
    )


def names_of(tests: Tests) -> set[str]:
    """Return the names that the code of a response must define for these tests."""
    if isinstance(tests, Calls):
        return {tests.name}
    if isinstance(tests, Programs):
        return set()
    asked = tests.split.response_steps
    parts = [ast.parse(step["do"] if "do" in step else step["value"]) for step in asked]
    needed, own = set[str](), set(dir(builtins))
    for part in parts:
        own_there = names_assigned(part)
        needed |= names_read(part) - own - own_there
        own |= own_there
    return needed


def _listed(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Ungradable(f"`{name}` is not a list")
    return value


def _texts(value: object, name: str) -> list[str]:
    """Return texts; a list of lines is joined to one, as some data sets have it."""
    texts = [
        "\n".join(one) if isinstance(one, list) and all(isinstance(x, str) for x in one) else one
        for one in _listed(value, name)
    ]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise Ungradable(f"`{name}` is not a list of texts")
    return texts


def _arguments(given: object) -> list[Any]:
    """Return the arguments of a call: a list (APPS), or one JSON value per line (LiveCodeBench)."""
    if isinstance(given, list):
        return given
    if not isinstance(given, str):
        raise Ungradable(f"the arguments {given!r:.60} are no list and no lines of JSON")
    try:
        return [parse_json(line) for line in given.splitlines() if line.strip()]
    except ValueError as error:
        raise Ungradable(f"the arguments {given!r:.60} are no lines of JSON: {error}") from None


def _value(given: object) -> object:
    """Return the value of a text that is JSON (LiveCodeBench); any other value stays."""
    if isinstance(given, str):
        try:
            return parse_json(given)
        except ValueError:
            return given
    return given


def same_output(printed: str, expected: str) -> bool:
    """Compare output line by line, without white space at the ends of lines and empty lines at the
    end; if lines have numbers with decimals, word by word within the tolerance."""
    have, want = (
        [line.strip() for line in text.strip().splitlines()] for text in (printed, expected)
    )
    if have == want:
        return True
    if len(have) != len(want) or not any("." in line for line in want):
        return False
    return all(
        len(a.split()) == len(b.split()) and all(map(_same_word, a.split(), b.split()))
        for a, b in zip(have, want, strict=True)
    )


def _same_word(have: str, want: str) -> bool:
    if have == want:
        return True
    if "." not in want or "_" in have:  # Python reads 3_5.0 as 35.0
        return False
    try:
        return math.isclose(float(have), float(want), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def same_value(have: object, want: object) -> bool:
    """Compare a call's result, as the harness encodes it, with JSON: tuples and sets are lists
    there, of which those of sets may be in any order; numbers with decimals may differ by the
    tolerance. Either may be alone in a list, as in APPS. A result that Python cannot compare, as it
    is too large or nested too deep, equals nothing."""
    try:
        plain = _plain(have)
        return _same(plain, want, 0) or _same(plain, [want], 0) or _same([plain], want, 0)
    except (OverflowError, RecursionError, ValueError):
        return False


def _plain(value: object) -> object:
    """Return the harness's JSON without its type names; a set is a tuple, anything else that has
    items a list."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((name, items),) = value.items()
    if not isinstance(items, list):
        return None
    if name == "dict":
        pairs = [one for one in items if isinstance(one, list) and len(one) == 2]
        return {_key(key): _plain(item) for key, item in pairs}
    plain = [_plain(item) for item in items]
    return tuple(sorted(plain, key=_rank)) if name in ("set", "frozenset") else plain


def _rank(value: object) -> tuple[int, float, str]:
    """Return the key by which items of a set are sorted: numbers by size, others by their text."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, repr(value))


def _key(key: object) -> str:
    """Return a key as JSON writes it."""
    return key if isinstance(key, str) else json.dumps(_plain(key))


def _same(have: object, want: object, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return False
    if isinstance(have, tuple) and isinstance(want, list):
        return _same_in_any_order(have, want, depth)
    if isinstance(have, list) and isinstance(want, list):
        return len(have) == len(want) and all(
            _same(a, b, depth + 1) for a, b in zip(have, want, strict=True)
        )
    if isinstance(have, dict) and isinstance(want, dict):
        return have.keys() == want.keys() and all(
            _same(have[key], want[key], depth + 1) for key in want
        )
    numbers = (int, float)
    if isinstance(have, bool) or isinstance(want, bool):
        return have is want
    if (
        isinstance(have, numbers)
        and isinstance(want, numbers)
        and float in (type(have), type(want))
    ):
        return math.isclose(have, want, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return have == want


def _same_in_any_order(have: tuple[object, ...], want: list[object], depth: int) -> bool:
    """Compare a set, whose items are sorted, with a list. Equal ones take one pass, as both are
    sorted alike."""
    left = sorted(want, key=_rank)
    if len(have) != len(left):
        return False
    for item in reversed(have):
        places = reversed(range(len(left)))
        place = next((place for place in places if _same(item, left[place], depth + 1)), None)
        if place is None:
            return False
        del left[place]
    return True
