"""Renders a question with options as a prompt, and finds the letter of the right option. It knows
no names of columns and no file; `layouts` says which columns have them."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.data.messages import parsed, present
from milescli.data.tables import kind_of

LETTERS = string.ascii_uppercase
MAX_OPTIONS = len(LETTERS)
_LETTERED = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*(.*)", re.DOTALL)
"""An option with its own letter: `A)21`, `(B) Paris`."""
_OWN_NAMES, _OWN_TEXTS = ("label", "labels", "key"), ("text", "texts")
"""Fields of an object of options, or of each option in a list."""

Options = tuple[list[str], list[str]]
"""(names of the options in the row, their texts), in order."""


def is_options(value: Any) -> bool:
    """Return True if a value looks like the options of a question; faults within them are reported
    later, by line."""
    found = parsed(value) if isinstance(value, str) else value
    if isinstance(found, Mapping) and _fields(found) is not None:
        return True
    try:
        return len(_options(found, "options")[1]) > 1
    except ValueError:
        return False


def options_in(record: Mapping[str, Any], columns: Sequence[str], *, answer: str | None) -> Options:
    """Return the options of a row, from one column that has all of them, or from columns with one
    each. If `answer`, the column of the right one, is among these, they are in alphabetical order
    with their texts as names. Raises ValueError."""
    where = f"`{columns[0]}`"
    if len(columns) == 1:
        names, texts = _options(present(record, columns[0]), columns[0])
    else:
        names, texts = [], [_text(present(record, column), column) for column in columns]
        if answer in columns:
            names = texts = sorted(texts, key=str.casefold)
    if not 2 <= len(texts) <= MAX_OPTIONS:
        raise ValueError(f"{where} must contain 2 to {MAX_OPTIONS} options, but has {len(texts)}")
    if twice := next((one for number, one in enumerate(names) if one in names[:number]), None):
        raise ValueError(f"{where} contains the option {twice} twice")
    return names, texts


def with_options(question: str, texts: Sequence[str]) -> str:
    """Return the question, and below it the options with the letters A, B, ..."""
    lines = (f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    return "\n".join([question.rstrip(), "", *lines])


def letter_of(answer: Any, options: Options, *, key: str, first: int) -> str:
    """Return the letter of the right option. `answer`: its name in the row, its letter, its number
    (`first` is the number of the first option) or its text. Raises ValueError."""
    names, texts = options
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # a column of integers with a gap
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise ValueError(f"`{key}` must name an option, but is {kind_of(answer)}")
    text = str(answer).strip()
    places = _option_indices(text, options, first=first)
    if isinstance(answer, str) and texts.count(text) == 1:
        places.append(texts.index(text))
    if not places:
        numbers = f"{first} to {first + len(texts) - 1}, A to {LETTERS[len(texts) - 1]}"
        raise ValueError(f"`{key}` is {text!r}, but the options are {', '.join(names) or numbers}")
    if len({*places}) > 1:
        letters = " or ".join(LETTERS[place] for place in places)
        raise ValueError(f"`{key}` is {text!r}, which could be {letters}: its number or its text")
    return LETTERS[places[0]]


def _option_indices(answer: str, options: Options, *, first: int) -> list[int]:
    """Return [0 or 1] the index of the option whose name, letter or number is `answer`."""
    names, texts = options
    place = -1
    if names:
        upper = [name.upper() for name in names]
        place = names.index(answer) if answer in names else -1
        place = upper.index(answer.upper()) if place < 0 and answer.upper() in upper else place
    elif answer.lstrip("-").isdecimal():
        place = int(answer) - first
    elif len(answer) == 1 and answer.upper() in LETTERS:
        place = LETTERS.index(answer.upper())
    return [place] if 0 <= place < len(texts) else []


def _fields(found: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the values of the fields of names and of texts; None if one of the fields is
    missing."""
    names = next((found[name] for name in _OWN_NAMES if name in found), None)
    texts = next((found[name] for name in _OWN_TEXTS if name in found), None)
    return None if names is None or texts is None else (names, texts)


def _options(value: Any, key: str) -> Options:
    found = parsed(value) if isinstance(value, str) else value
    if isinstance(found, Mapping):
        if fields := _fields(found):
            names, texts = (list(each) if isinstance(each, list) else [] for each in fields)
            if len(names) != len(texts):
                raise ValueError(f"`{key}` has {len(names)} letters and {len(texts)} texts")
            return [_text(one, key) for one in names], [_text(one, key) for one in texts]
        if all(len(name) == 1 for name in found):
            filled = {name: one for name, one in found.items() if one is not None}
            return list(filled), [_text(one, key) for one in filled.values()]
    if not isinstance(found, list):
        raise ValueError(f"`{key}` must be a list of options, not {kind_of(found)}")
    if found and all(isinstance(one, Mapping) for one in found):
        pairs = [_fields(one) or (None, None) for one in found]
        return [_text(name, key) for name, _ in pairs], [_text(text, key) for _, text in pairs]
    texts = [_text(one, key) for one in found]
    own = [match for one in texts if (match := _LETTERED.fullmatch(one))]
    if len(own) == len(texts) and [one[1].upper() for one in own] == list(LETTERS[: len(own)]):
        return [], [one[2].strip() for one in own]
    return [], texts


def _text(value: Any, key: str) -> str:
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise ValueError(f"`{key}` must contain texts, but one is {kind_of(value)}")
    return str(value).strip()
