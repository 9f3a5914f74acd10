"""`miles plugins`: every plug point, what ships for it, whether something of the user's fits, and a
file to begin with."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError, nearest
from milescli.core.imports import imported
from milescli.listings.plug_points import POINTS, PlugPoint


def point_of(kind: str) -> PlugPoint:
    """Raises RecipeError where there is no such kind."""
    points = {point.kind: point for point in POINTS}
    if kind in points:
        return points[kind]
    raise RecipeError(
        f"no plug point is called `{kind}`",
        why=f"there are {', '.join(points)}",
        fix=["miles plugins new {0} my_{0}".format(nearest(kind, points) or "reward")],
    )


def checked_there(kind: str, path: str) -> None:
    """In the process of what `path` names."""
    point = point_of(kind)
    point.contract_test(point.registry.resolve(path, key=point.key))


def the_one_that_fits(path: str) -> PlugPoint:
    """Whose parameters are those of what `path` names. Raises RecipeError where it cannot be had,
    or fits none or several."""
    plugin: Any = imported(path)
    target = plugin.__init__ if inspect.isclass(plugin) else plugin
    names = set(inspect.signature(target).parameters) - {"self"} if callable(plugin) else set()
    fitting = [
        point
        for point in POINTS
        if point.registry.signature
        and names in map(set, (point.registry.signature, *point.registry.others))
    ]
    if len(fitting) == 1:
        return fitting[0]
    kinds = [point.kind for point in fitting or POINTS]
    raise RecipeError(
        f"what kind of plug-in `{path}` is cannot be told",
        why=f"it takes ({', '.join(sorted(names))}), as {'several do' if fitting else 'none does'}",
        fix=[f"miles plugins check {path} {kind}" for kind in kinds[:3]]
        + ["miles plugins   # what each takes"] * (not fitting),
    )


def written(point: PlugPoint, name: str, folder: Path) -> list[Path]:
    """A working plug-in and its test, in files that were not there. Raises RecipeError where they
    are, or `name` is no name of a module."""
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if not name.isidentifier() or name != name.lower():
        raise RecipeError(
            f"`{name}` is no name of a Python module",
            why="it becomes a file and a function: small letters, digits and _",
            fix=f"miles plugins new {point.kind} my_{point.kind}",
        )
    if there := [file.name for file in files if file.exists()]:
        raise RecipeError(
            f"`{there[0]}` is there already",
            why="nothing is written over",
            fix=f"miles plugins new {point.kind} {name}_2",
        )
    for file, text in zip(files, (_source(point, name), _test(point, name)), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def _source(point: PlugPoint, name: str) -> str:
    prefix = "async def" if point.is_async else "def"
    body = "\n".join(f"    {line}".rstrip() for line in point.body.split("\n"))
    imports = f"{point.imports}\n\n" if point.imports else "\n"
    head = f"class {name}({point.base}):" if point.base else f"{prefix} {name}({point.arguments}):"
    return (
        f'"""A plug-in of miles: {point.about}.\n\n'
        f"export PYTHONPATH=$PWD\n"
        f'miles launch --recipe quickstart --set {point.command_part(f"{name}:{name}")}\n"""\n\n'
        f"{imports}{head}\n{body}\n"
    )


def _test(point: PlugPoint, name: str) -> str:
    module, _, check = point.contract.partition(":")
    return (
        f"from {module} import {check}\n\nfrom {name} import {name}\n\n\n"
        f"def test_it_bears_its_contract():\n    {check}({name})\n"
    )
