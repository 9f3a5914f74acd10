"""Restores values of a row that a columnar file type changed: fields that the row never had,
numbers of 32 bits, JSON in texts. `tables` applies it only to columns of such types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milescli.core.files import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

Restore = Callable[[Any], Any]
JSON_TYPE = "arrow.json"
"""Name of Arrow's extension type for JSON, which `datasets` writes where types are mixed."""
OPEN_OBJECT = "properties"
"""Name of the field of a JSON schema whose fields have names that its author chose."""


def restorer(column: pa.Array) -> Restore | None:
    """Return the function that restores the values of a column; None: they are exact."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _json if kind.extension_name == JSON_TYPE else restorer(column.storage)
    if types.is_dictionary(kind):
        return restorer(column.dictionary)
    if types.is_float32(kind) or types.is_float16(kind):
        return _shortest(kind)
    if types.is_struct(kind):
        parts = {field.name: column.field(place) for place, field in enumerate(kind)}
        has_nulls = any(part.null_count for part in parts.values())
        return _fields({name: restorer(part) for name, part in parts.items()}, has_nulls=has_nulls)
    if types.is_map(kind):
        return _entries(restorer(column.items))
    if types.is_nested(kind) and hasattr(column, "flatten"):
        return _items(restorer(column.flatten()))
    return None


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the fields that are null, at any depth, as `restorer` does."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(named := found.get(OPEN_OBJECT), dict):
        before = value[OPEN_OBJECT]
        found[OPEN_OBJECT] = {k: item for k, item in named.items() if item != {} or not before[k]}
    return found


def _shortest(kind: pa.DataType) -> Restore:
    """Return a function that turns a number of few bits into the double with the shortest decimal
    form: 0.1, which a column of float32 would give as 0.10000000149011612."""
    import numpy as np
    import pyarrow as pa

    number = np.float16 if pa.types.is_float16(kind) else np.float32
    return lambda value: None if value is None else float(str(number(value)))


def _json(value: Any) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _fields(restore: dict[str, Restore | None], *, has_nulls: bool) -> Restore | None:
    """Return a function that removes the null fields of an object: in such a column every object
    has the fields of all objects, with null for those that it lacked."""
    inner = {name: each for name, each in restore.items() if each is not None}
    is_open = OPEN_OBJECT in restore
    if not inner and not is_open and not has_nulls:
        return None

    def restored(value: Any) -> Any:
        if value is None:
            return None
        if None in value.values():
            value = {name: item for name, item in value.items() if item is not None}
        for name, each in inner.items():
            if name in value:
                value[name] = each(value[name])
        if is_open and isinstance(named := value.get(OPEN_OBJECT), dict):
            # some writers make an object of nulls of a field that the row lacks
            value[OPEN_OBJECT] = {name: item for name, item in named.items() if item != {}}
        return value

    return restored


def _entries(restore: Restore | None) -> Restore:
    def restored(value: Any) -> Any:
        if value is None:
            return None
        return {key: item if restore is None else restore(item) for key, item in value}

    return restored


def _items(restore: Restore | None) -> Restore | None:
    if restore is None:
        return None
    return lambda value: None if value is None else [restore(item) for item in value]
