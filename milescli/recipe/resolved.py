"""Converts a LoadedRecipe to the `recipe.yaml` of a run directory and back, without loss: every
key, its value, and as a comment who set it."""

from __future__ import annotations

import re
from pathlib import Path

from milescli.core.errors import CheckpointError, RecipeError
from milescli.recipe import layers
from milescli.recipe.layers import KeyValue, Origin, SettingsLayer
from milescli.recipe.load import LoadedRecipe, build, value_at
from milescli.recipe.reader import YamlNode, as_written, read
from milescli.recipe.section import scalar_yaml

_WORD = re.compile(r"[A-Za-z0-9_./@+-]+\Z")
"""A text that needs no quotes, unless it reads as a number, true or null."""

_HEADER = (
    "# The whole recipe of this run, with the origin of each value. It loads again: "
    "--recipe {source}\n"
)


def resolved_yaml(loaded: LoadedRecipe) -> str:
    """Write one line per key: `  steps: 40  # set --set train.steps=40`."""
    lines, open_sections = [_HEADER.format(source="PATH").rstrip()], [""]
    for name, origin in loaded.origins.items():
        parent, _, last = name.rpartition(".")
        if parent and parent not in open_sections:
            open_sections.append(parent)
            null = value_at(loaded.recipe, parent) is None
            comment = f"  # {origin}" if null else ""
            lines.append(
                f"{_indent(parent)}{parent.rpartition('.')[2]}:{' null' if null else ''}{comment}"
            )
        if parent and value_at(loaded.recipe, parent) is None:
            continue
        lines.append(
            f"{_indent(name)}{last}: {scalar_yaml(value_at(loaded.recipe, name))}  # "
            f"{' '.join(str(origin).split())}"
        )
    return "\n".join(lines) + "\n"


def load_resolved(path: Path) -> LoadedRecipe:
    """Read a run's `recipe.yaml`, with the origins in its comments. Raises CheckpointError if the
    file is missing or damaged."""
    try:
        text = layers.read_text(path, what="the run's recipe")
        table = layers.from_yaml(text, source=str(path), layer=SettingsLayer.RECIPE)
    except RecipeError as error:
        raise CheckpointError(
            f"the run's recipe `{path}` cannot be read",
            why=f"{error.what}: {error.why}",
            fix=[f"ls {path.parent}   # is this a run directory?", *error.fixes],
        ) from None
    for name, entry in list(table.items()):
        origin = _origin(entry.comment) or entry.origin
        table[name] = KeyValue(value=entry.value, text=entry.text, origin=origin)
    return build(table, source=str(path))


def _origin(comment: str) -> Origin | None:
    try:
        return Origin.parse(comment)
    except ValueError:
        return None  # a comment of the user's own


def _indent(name: str) -> str:
    return "  " * name.count(".")


def node_yaml(node: YamlNode) -> str:
    """Write a node on one line, as `--set` and a recipe read it: the same value for any key,
    including line breaks and backslashes."""
    if isinstance(node.value, dict):
        items = (f"{scalar_yaml(key)}: {_inner(child)}" for key, child in node.value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(node.value, list):
        return f"[{', '.join(map(_inner, node.value))}]"
    if not isinstance(node.value, str):
        return node.text  # `1e-6` stays as written, since a text key keeps the spelling
    is_word = _WORD.match(node.value) and as_written(read(node.value, source="")) == node.value
    return node.value if is_word else scalar_yaml(node.value)


def _inner(node: YamlNode) -> str:
    return node_yaml(node) or "null"
