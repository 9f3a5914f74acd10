"""The JSON schema of a tool that a model receives: read from the signature and the docstring of a
function, or of a class's `__call__`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from milescli.core.errors import RecipeError

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_ARGUMENT = re.compile(r"^\s+(\w+)(?: \(.*?\))?:\s*(.*)$")


def schema_of(tool: Any, *, name: str) -> Mapping[str, Any]:
    """Return the schema in OpenAI's form. The first paragraph of the docstring says what the tool
    does, its section `Args:` what each parameter is. `name`: the tool's name for the model. Raises
    RecipeError if a parameter's type has no JSON equivalent."""
    call = tool.__call__ if inspect.isclass(tool) else tool
    about = inspect.getdoc(tool) or inspect.getdoc(call) or ""
    described = _parameter_docs(inspect.getdoc(call) or about)
    properties, required = {}, []
    for parameter in parameters_of(tool):
        schema = _schema(_hints(call).get(parameter.name))
        if schema is None:
            raise RecipeError(
                f"the tool `{name}` does not declare the type of `{parameter.name}`",
                why="the model must know the type of each parameter: str, int, float, bool, "
                "list, dict, Literal or Optional of these",
                fix=f"def {name}({parameter.name}: str, ...)",
            )
        if parameter.name in described:
            schema = {**schema, "description": described[parameter.name]}
        properties[parameter.name] = schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(about.split("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def parameters_of(tool: Any) -> list[inspect.Parameter]:
    """Return the parameters that a model may set, those that can be passed by name."""
    call = tool.__call__ if inspect.isclass(tool) else tool
    parameters = list(inspect.signature(call).parameters.values())
    if inspect.isclass(tool):
        parameters = parameters[1:]
    return [parameter for parameter in parameters if parameter.kind in _BY_NAME]


def fits(value: object, parameter: inspect.Parameter) -> bool:
    """Return True if a value from JSON has the plain type that a parameter declares, if it declares
    one."""
    wanted = parameter.annotation
    plain = wanted if isinstance(wanted, type) else _NAMED.get(wanted)
    if plain not in _TYPES:
        return True
    if isinstance(value, bool) or plain is bool:
        return isinstance(value, bool) and plain is bool
    return isinstance(value, (int, float) if plain is float else plain)


_NAMED = {kind.__name__: kind for kind in _TYPES}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _hints(call: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(call)
    except Exception:  # a name that only a type checker imports: told as a missing type
        return {}


def _schema(hint: Any) -> dict[str, Any] | None:
    """Return the schema of a type; None if JSON has no such type."""
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if hint is list or origin in (list, tuple, Sequence):
        items = _schema(arguments[0]) if arguments else None
        return {"type": "array", **({"items": items} if items else {})}
    if origin in (dict, Mapping):
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        known = [argument for argument in arguments if argument is not type(None)]
        return _schema(known[0]) if len(known) == 1 else None
    return None


def _parameter_docs(docstring: str) -> dict[str, str]:
    """Return parameter -> its description in the section `Args:`."""
    _, found, section = docstring.partition("Args:\n")
    described: dict[str, str] = {}
    for line in section.splitlines() if found else ():
        if not line.strip():
            break
        if argument := _ARGUMENT.match(line):
            described[argument[1]] = argument[2]
    return described
