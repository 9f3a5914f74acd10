"""Parses YAML text to values that know their line. Safe, and narrower than YAML 1.1.

No aliases, no tags, no duplicate keys, no `on` for true.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import yaml

from milescli.core.errors import RecipeError
from milescli.recipe.keys import RecipeKey

MAX_DEPTH = 20
"""Largest depth of nesting. A recipe has four levels; one with many more is a mistake, or an attack
on the parser."""

NULL_TEXTS = ("", "~", "null", "Null", "NULL")


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.2 scalars: `1e-6` is a number, `no` and `12:30` are text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)\Z")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlNode:
    """Holds a value of the YAML text, with its place in it."""

    value: object
    """A scalar, a list of scalars, or a `dict[str, YamlNode]`."""
    text: str
    """Source text for error messages, including quotes."""
    plain: bool
    """True if it is written without quotes."""
    line: int
    comment: str = ""
    """Comment after it on the same line."""


def read(text: str, *, source: str) -> YamlNode:
    """Parse the one document in `text`. `source` is its name in errors (`quickstart.yaml`). Raises
    RecipeError with file:line."""
    try:
        _refuse_tricks(text, source=source)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error, source=source) from None
    except RecursionError:
        raise _too_deep(source, 1) from None
    if root is None:
        return YamlNode(value={}, text="", plain=True, line=1)
    return _convert(root, text.splitlines(), source=source)


def _refuse_tricks(text: str, *, source: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise RecipeError(
                f"{source}:{line}: YAML aliases are not read",
                why=f"`*{event.anchor}` makes a value depend on another place; in a recipe, "
                "write every value where it is used",
                fix=f"write the value itself at {source}:{line}",
            )
        if getattr(event, "tag", None) not in (None, "!"):
            raise RecipeError(
                f"{source}:{line}: YAML tags are not read",
                why=f"`{event.tag}` asks the parser to construct an object; a recipe contains "
                "only plain values",
                fix=f"write the value itself at {source}:{line}",
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise _too_deep(source, line)


def _too_deep(source: str, line: int) -> RecipeError:
    return RecipeError(
        f"{source}:{line}: nested too deeply",
        why=f"more than {MAX_DEPTH} levels; a recipe has at most four",
        fix="miles help recipe   # shows every key",
    )


def _not_yaml(error: yaml.YAMLError, *, source: str) -> RecipeError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{source}:{mark.line + 1}" if mark else source
    problem = (
        getattr(error, "problem", None)
        or getattr(error, "reason", None)
        or "the text cannot be parsed"
    )
    column = f" at column {mark.column + 1}" if mark else ""
    return RecipeError(f"{where}: not valid YAML", why=f"{problem}{column}", fix=f"correct {where}")


def _convert(node: yaml.Node, lines: list[str], *, source: str) -> YamlNode:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, lines, source=source)
    if isinstance(node, yaml.SequenceNode):
        items = [_convert(item, lines, source=source) for item in node.value]
        text = "[" + ", ".join(item.text for item in items) + "]"
        return YamlNode(
            value=items, text=text, plain=True, line=line, comment=_comment(node, lines)
        )
    assert isinstance(node, yaml.MappingNode), node
    children: dict[str, YamlNode] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError(
                f"{source}:{key_line}: a key must be a word",
                why="the key is a list or a mapping",
                fix=f"write `key: value` at {source}:{key_line}",
            )
        key = _text(key_node, source=source)
        if key in children:
            raise RecipeError(
                f"{source}:{key_line}: `{key}` is set twice",
                why=f"line {children[key].line} already sets it, and one of the two values would "
                "be lost",
                fix=f"remove one of lines {children[key].line} and {key_line} of {source}",
            )
        children[key] = _convert(value_node, lines, source=source)
    text = "{" + ", ".join(f"{key}: {child.text}" for key, child in children.items()) + "}"
    comment = _comment(node, lines) if node.flow_style else ""
    return YamlNode(value=children, text=text, plain=True, line=line, comment=comment)


def _scalar(node: yaml.ScalarNode, lines: list[str], *, source: str) -> YamlNode:
    plain, text = node.style is None, _text(node, source=source)
    return YamlNode(
        value=_plain_value(text) if plain else text,
        text=text if plain else f'"{text}"',
        plain=plain,
        line=node.start_mark.line + 1,
        comment=_comment(node, lines),
    )


def _text(node: yaml.ScalarNode, *, source: str) -> str:
    """Return the scalar's text. JSON may write a character as two escapes, which YAML reads as two
    halves of it: `"\\ud83d\\ude00"`. Raises RecipeError for half a character."""
    text: str = node.value
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        where = f"{source}:{node.start_mark.line + 1}"
        raise RecipeError(
            f"{where}: a text contains half a character",
            why="an escape between `\\ud800` and `\\udfff` has no partner",
            fix=f"write the character itself at {where}",
        ) from None


def _plain_value(text: str) -> object:
    if text in NULL_TEXTS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.match(text):
        return int(text.replace("_", "")) if len(text) < 40 else float(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    if _SPECIAL.match(text):
        return float(text.replace(".", "", 1))
    return text


def _comment(node: yaml.Node, lines: list[str]) -> str:
    if not lines or node.end_mark.line >= len(lines):
        return ""
    rest = lines[node.end_mark.line][node.end_mark.column :].strip()
    return rest[1:].strip() if rest.startswith("#") else ""


def typed_value(node: YamlNode, key: RecipeKey) -> object:
    """Convert the node to the key's type: text keys keep the user's spelling; lists hold texts, or
    mappings whose keys are typed likewise, as do mappings of names."""
    if isinstance(node.value, list) and key.items:
        return [_typed_item(item, key.items) for item in node.value]
    if isinstance(node.value, dict) and key.items:
        return {name: _typed_item(child, key.items) for name, child in node.value.items()}
    if isinstance(node.value, dict):
        return {
            name: as_written(child) if key.takes_mapping else child.text
            for name, child in node.value.items()
        }
    if isinstance(node.value, list):
        return [item.text if item.plain else item.value for item in node.value]
    if key.is_text and not key.is_list and node.plain and not (key.optional and node.value is None):
        return node.text
    return node.value


def as_written(node: YamlNode) -> object:
    """Return the values of the text, regardless of their key."""
    if isinstance(node.value, dict):
        return {name: as_written(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [as_written(item) for item in node.value]
    return node.value


def _typed_item(node: YamlNode, items: Sequence[RecipeKey]) -> object:
    if not isinstance(node.value, dict):
        return node.text
    return {name: _typed_child(child, name, items) for name, child in node.value.items()}


def _typed_child(node: YamlNode, name: str, items: Sequence[RecipeKey]) -> object:
    """Convert the value of a key, or of a section within the item."""
    for item in items:
        if item.name == name:
            return typed_value(node, item)
    head = f"{name}."
    inner = [replace(i, name=i.name.removeprefix(head)) for i in items if i.name.startswith(head)]
    if inner and node.value is None:
        return None
    return _typed_item(node, inner) if inner else node.text
