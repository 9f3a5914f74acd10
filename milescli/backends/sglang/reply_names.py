"""The names that SGLang gives its parsers, read from its source: to import it takes seconds, and a
wrong name is refused before anything is started."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from milescli.core.errors import RecipeError, nearest
from milescli.recipe.schema import Rollout

AUTO, NONE = "auto", "none"
_TABLES = {
    "tool_parser": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("parser/reasoning_parser.py", "DetectorMap"),
}
"""Recipe key -> file below `sglang/srt`, and the table in it."""


def check_parsers(rollout: Rollout) -> None:
    """Raises RecipeError where `rollout.tool_parser` or `rollout.reasoning_parser` names none."""
    for key in _TABLES:
        name = getattr(rollout, key)
        known = names_of(key) if name not in (AUTO, NONE) else ()
        if known and name not in known:
            raise no_parser(name, key=key, known=known)


def names_of(key: str) -> list[str]:
    """Empty where SGLang has them elsewhere than we know of; it says itself then."""
    file, table = _TABLES[key]
    spec = find_spec("sglang")
    roots = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(roots), "")) / "srt" / file if roots else None
    if path is None or not path.is_file():
        return []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            named = isinstance(node.target, ast.Name) and node.target.id == table
            if named:
                keys = [item for item in node.value.keys if isinstance(item, ast.Constant)]
                return [str(item.value) for item in keys]
    return []


def no_parser(name: str, *, key: str, known: Iterable[str]) -> RecipeError:
    """Of a name that SGLang does not have."""
    names = sorted(known)
    return RecipeError(
        f"SGLang knows no parser `{name}`",
        why=f"`rollout.{key}` is {AUTO}, {NONE} or one of {', '.join(names)}",
        fix=f"--set rollout.{key}={nearest(name, names) or AUTO}",
    )
