"""Every name that a file of this repository imports from another is defined there, imports inside
functions included: those would fail only where a user reaches them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_OTHERS = {ROOT / "bench/gpu/parts", ROOT / "bench/gpu/site"}
"""Packages, where bench/gpu/pack.sh and unpack.sh have run."""


@cache
def defined_in(module: str) -> frozenset[str] | None:
    """Names that a module binds at its top level, and its submodules; None where there is no such
    module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset() if path.is_dir() else None
    names = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(names)


def missing_names(text: str) -> list[str]:
    """`line: module.name` of every import from this repository that leads nowhere."""
    return [
        f"{node.lineno}: {node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("milescli", "tests")
        for alias in node.names
        if alias.name not in (defined_in(node.module or "") or ())
    ]


def test_every_imported_name_is_there() -> None:
    missing = [
        f"{file.relative_to(ROOT)}:{name}"
        for folder in ("milescli", "tests", "bench", "docs")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not OF_OTHERS & {*file.parents}
        for name in missing_names(file.read_text(encoding="utf-8"))
    ]
    assert not missing, "\n" + "\n".join(missing)


def test_the_walk_sees_imports_inside_functions() -> None:
    assert missing_names("def f():\n    from milescli.plan.make import nothing") == [
        "2: milescli.plan.make.nothing"
    ]
    assert missing_names("from milescli.attic import old") == ["1: milescli.attic.old"]
    assert missing_names("from milescli.plan import make\nfrom tests import samples") == []
