"""Lists the keys of a recipe: names, types in words, defaults, docs. Reads them from the schema, so
that help, completion and errors always agree with it."""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import types
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from milescli.core.errors import nearest
from milescli.recipe.schema import Recipe
from milescli.recipe.section import Names, Section

SETTINGS = ("machine", "run")
"""Sections that say where a run is stored and runs, not what it learns: only these may be set by
the environment and user files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeKey:
    """Describes one key of a recipe."""

    name: str
    """Dotted name, as in `--set`: `train.optimizer.lr`."""
    wants: str
    """The type in words: `a whole number >= 1`."""
    default: object
    doc: str
    is_text: bool
    """True if the value is text, which is not parsed: a run called 007 keeps its zeros."""
    is_list: bool
    optional: bool
    """True if `null` is allowed."""
    takes_mapping: bool = False
    """True if a mapping of names to numbers, or to any values, is allowed too."""
    takes_list: bool = False
    """True if both a text and a list of texts are allowed."""
    items: tuple[RecipeKey, ...] = ()
    """Keys of each mapping, if the value is a list or a mapping of mappings."""
    choices: tuple[str, ...] = ()
    number: str | None = None
    """Example of a number that the key allows; None if it allows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionInfo:
    """Describes a section, which is a part of the recipe that holds keys."""

    name: str
    doc: str
    optional: bool
    """True if it may be null: `model.scratch`."""


@cache
def keys() -> dict[str, RecipeKey]:
    """Return every key by its dotted name, in the order of the schema."""
    return {item.name: item for item in _walk(Recipe, "") if isinstance(item, RecipeKey)}


@cache
def sections() -> dict[str, SectionInfo]:
    """Return every section by its dotted name."""
    return {item.name: item for item in _walk(Recipe, "") if isinstance(item, SectionInfo)}


def nearest_key(name: str, *, within: tuple[str, ...] = ()) -> str | None:
    """Return the key or section that `name` probably means; `within` limits the search to some
    sections."""
    known = [key for key in (*keys(), *sections()) if not within or key.split(".")[0] in within]
    if name in known:
        return name
    head, _, tail = name.rpartition(".")
    endings = [key for key in known if key.endswith(f".{name}")]
    if endings:
        return min(endings, key=len)
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == head}
    words = set(tail.split("_"))
    fuller = [
        sibling for sibling in siblings if len(words) > 1 and words <= set(sibling.split("_"))
    ]
    below = [key for key in known if head and _is_below(key, head, tail)]
    if below and not fuller:
        return below[0]
    guess = fuller[0] if fuller else nearest(tail, siblings)
    if guess:
        return siblings[guess]
    by_tail = {key.rpartition(".")[2]: key for key in reversed(known)}
    if tail in by_tail:
        return by_tail[tail]
    guess = nearest(name, known) if head else nearest(tail, by_tail)
    return by_tail.get(guess, guess) if guess else None


def _is_below(key: str, head: str, tail: str) -> bool:
    """Return True if the key has the name `tail` in a subsection of `head`."""
    parts = key.split(".")
    return (
        len(parts) == len(head.split(".")) + 2 and key.startswith(head + ".") and parts[-1] == tail
    )


def _walk(section: type[Section], prefix: str) -> list[RecipeKey | SectionInfo]:
    items: list[RecipeKey | SectionInfo] = []
    for name, info in section.model_fields.items():
        dotted = f"{prefix}{name}"
        inner = _section_of(info)
        if inner is None:
            items.append(_key(dotted, info, doc_of(section, name)))
        else:
            doc = doc_of(section, name) or inner.__doc__ or ""
            items.append(SectionInfo(name=dotted, doc=doc, optional=_is_optional(info.annotation)))
            items.extend(_walk(inner, f"{dotted}."))
    return items


def _key(dotted: str, info: FieldInfo, doc: str) -> RecipeKey:
    base, bounds = _unwrap(info.annotation, tuple(info.metadata))
    choices = tuple(str(choice) for choice in get_args(base)) if get_origin(base) is Literal else ()
    optional = _is_optional(info.annotation)
    is_list = get_origin(base) is list
    is_mapping = get_origin(base) is dict
    takes_mapping = any(get_origin(arg) is dict for arg in get_args(info.annotation))
    return RecipeKey(
        name=dotted,
        wants=_words(base, bounds)
        + (", or a mapping of names to numbers" if takes_mapping else "")
        + (", or null" if optional else ""),
        default=info.default,
        doc=doc,
        is_text=base in (str, Names) or bool(choices) or is_list,
        takes_list=base == Names,
        items=_items(base),
        is_list=is_list,
        optional=optional,
        takes_mapping=takes_mapping or is_mapping,
        choices=choices,
        number=_number(bounds) if base in (int, float) else None,
    )


def _items(base: object) -> tuple[RecipeKey, ...]:
    item = get_args(base)[-1] if get_origin(base) in (list, dict) else None
    if not (isinstance(item, type) and issubclass(item, Section)):
        return ()
    return tuple(key for key in _walk(item, "") if isinstance(key, RecipeKey))


def _section_of(info: FieldInfo) -> type[Section] | None:
    base, _ = _unwrap(info.annotation, ())
    return base if isinstance(base, type) and issubclass(base, Section) else None


def _is_optional(annotation: object) -> bool:
    return type(None) in get_args(annotation)


def _unwrap(annotation: object, bounds: tuple[object, ...]) -> tuple[object, tuple[object, ...]]:
    """Return the type and the bounds of an annotation: `Annotated[int, Ge(1)] | None` -> (int,
    (Ge(1),))."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [
            arg
            for arg in get_args(annotation)
            if arg is not type(None) and get_origin(arg) is not dict
        ]
        if inner == list(get_args(Names)):
            return Names, bounds
        assert len(inner) == 1, f"a recipe key has one type: {annotation}"
        return _unwrap(inner[0], bounds)
    if get_origin(annotation) is Annotated:
        base, *extra = get_args(annotation)
        metadata = [
            item
            for part in extra
            for item in (part.metadata if isinstance(part, FieldInfo) else [part])
        ]
        return _unwrap(base, (*bounds, *metadata))
    return annotation, bounds


def _words(base: object, bounds: tuple[object, ...]) -> str:
    if get_origin(base) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(base))
    if items := _items(base):
        many = "a list of" if get_origin(base) is list else "a mapping of names to"
        return f"{many} mappings, each of {', '.join(item.name for item in items)}"
    if get_origin(base) is list:
        return "a list of texts"
    if get_origin(base) is dict:
        return "a mapping of names to values"
    if base == Names:
        return "text, or a list of texts"
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[base]  # type: ignore[index]
    limits = [limit for bound in bounds if (limit := _limit(bound))]
    return f"{name} {' and '.join(limits)}" if limits else name


_LIMITS = (
    (Ge, ">=", "ge", operator.ge),
    (Gt, ">", "gt", operator.gt),
    (Le, "<=", "le", operator.le),
    (Lt, "<", "lt", operator.lt),
)


def _limit(bound: object) -> str | None:
    for kind, sign, field, _ in _LIMITS:
        if isinstance(bound, kind):
            return f"{sign} {getattr(bound, field):.12g}"
    return None


def _number(bounds: tuple[object, ...]) -> str:
    """Return the first example number that is within all bounds."""
    return next(
        text
        for text in ("1", "0.5", "0.1", "2", "100")
        if all(
            compare(float(text), getattr(bound, field))
            for bound in bounds
            for kind, _, field, compare in _LIMITS
            if isinstance(bound, kind)
        )
    )


def doc_of(section: type[Section], name: str) -> str:
    """Return the documentation of a key or section within this one; empty if there is none."""
    for origin in section.__mro__:
        if text := _docs(origin.__module__).get((origin.__qualname__, name)):
            return text
    return ""


@cache
def _docs(module: str) -> dict[tuple[str, str], str]:
    """Map (class, name) to its documentation, for all classes of a module of this package."""
    if not module.startswith(f"{__package__}."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (one.name, statement.target.id): inspect.cleandoc(text.value.value)
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for statement, text in pairwise(one.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
