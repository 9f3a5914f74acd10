"""Every name that a file of this repository imports from another is defined there, imports inside
functions included: those would fail only where a user reaches them."""

from __future__ import annotations

from functools import cache

from tests.python_sources import ROOT, Source, files, read, source_of


@cache
def defined_in(module: str) -> frozenset[str] | None:
    """Names that a module binds, and its submodules; None where there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset() if path.is_dir() else None
    inside = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    return frozenset(read(file).names | inside)


def missing_names(source: Source) -> list[str]:
    """`line: module.name` of every import from this repository that leads nowhere."""
    return [
        f"{one.line}: {one.module}.{one.name}"
        for one in source.imports
        if one.module.split(".")[0] in ("milescli", "tests")
        and one.name not in (defined_in(one.module) or ())
    ]


def test_every_imported_name_is_there() -> None:
    missing = [
        f"{file.relative_to(ROOT)}:{name}" for file in files() for name in missing_names(read(file))
    ]
    assert not missing, "\n" + "\n".join(missing)


def test_the_walk_sees_imports_inside_functions() -> None:
    source = source_of("def f():\n    from milescli.plan.make import nothing")
    assert missing_names(source) == ["2: milescli.plan.make.nothing"]
