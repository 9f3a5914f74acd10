"""What a piece of YAML is as the value of a key. Called by `layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from milescli.recipe.keys import RecipeKey
from milescli.recipe.reader import YamlNode


def typed_value(node: YamlNode, key: RecipeKey) -> object:
    """What the key's type makes of the node: text keys keep the user's spelling, lists hold
    texts, or mappings whose keys are typed alike, as do mappings of names."""
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
    """The values that the text has by itself, whatever key they are of."""
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
    """Of a key, or of a section within the item."""
    for item in items:
        if item.name == name:
            return typed_value(node, item)
    head = f"{name}."
    inner = [replace(i, name=i.name.removeprefix(head)) for i in items if i.name.startswith(head)]
    if inner and node.value is None:
        return None
    return _typed_item(node, inner) if inner else node.text
