"""What the schema refuses, in our words: the key, the user's own text, what is wanted. pydantic's
messages are never shown."""

from __future__ import annotations

from pydantic import ValidationError

from milescli.core.errors import RecipeError
from milescli.core.nearest import nearest
from milescli.recipe.keys import RecipeKey, keys
from milescli.recipe.layers import example
from milescli.recipe.tables import KeyValue, SettingsLayer, Table


def explain(error: ValidationError, table: Table) -> RecipeError:
    """The first refusal in full, the others by name."""
    places = [item["loc"] for item in error.errors(include_url=False)]
    names = list(dict.fromkeys(_key_of(place) for place in places))
    entry, key = table[names[0]], keys()[names[0]]
    others = (
        f"; also wrong: {', '.join(f'`{name}`' for name in names[1:])}" if len(names) > 1 else ""
    )
    said = f"`{entry.text}`" if entry.text else "nothing"
    return RecipeError(
        f"`{key.name}` cannot be {said}",
        why=f"it wants {key.wants}; {_place(entry)} says {said}{_within(key, places[0])}{others}",
        fix=_fix(key, entry),
    )


def _key_of(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in keys():
            return ".".join(parts[:end])
    raise AssertionError(f"the schema refused a place that is no key: {location}")


def _within(key: RecipeKey, location: tuple[int | str, ...]) -> str:
    """`, of which number 2 has a wrong weight`, of a list of mappings, or of a mapping to them."""
    inner = [part for part in location if part not in ("str", "list[str]")]
    inner = inner[key.name.count(".") + 1 :]
    if not key.items or not inner:
        return ""
    which = f"number {inner[0] + 1}" if isinstance(inner[0], int) else f"`{inner[0]}`"
    if len(inner) == 1:
        return f", of which {which} is no mapping"
    known = {item.name: f" ({item.wants})" for item in key.items}
    dotted = [".".join(map(str, inner[1:end])) for end in range(len(inner), 1, -1)]
    name = next((name for name in dotted if name in known), dotted[0])
    unknown = "" if name in known else "the unknown key "
    return f", of which {which} is wrong in {unknown}`{name}`{known.get(name, '')}"


def _place(entry: KeyValue) -> str:
    return (
        f"`{entry.origin.where}`" if entry.origin.layer is SettingsLayer.SET else entry.origin.where
    )


def _fix(key: RecipeKey, entry: KeyValue) -> str:
    better = _better_value(key, entry)
    if entry.origin.layer is SettingsLayer.SET:
        is_quoted = key.is_list or key.items
        return f"--set '{key.name}={better}'" if is_quoted else f"--set {key.name}={better}"
    if entry.origin.layer is SettingsLayer.ENV:
        return f"export {entry.origin.where}={better}"
    return f"write `{key.name.rpartition('.')[2]}: {better}` at {entry.origin.where}"


def _better_value(key: RecipeKey, entry: KeyValue) -> str:
    if key.choices:
        return nearest(entry.text, key.choices) or key.choices[0]
    if key.is_list and isinstance(entry.value, str):
        return f"[{entry.text}]"
    bare = entry.text.strip("\"'")
    is_quoted_number = entry.text != bare and bare.replace(".", "", 1).isdigit()
    return bare if is_quoted_number else example(key)
