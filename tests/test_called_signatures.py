"""Calls of functions and classes of this repository give the arguments that these take. A benchmark
or a check of a GPU visit that nobody ran since would fail only where a user runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.test_imported_names import OF_OTHERS, ROOT

FOLDERS = ("milescli", "tests", "bench", "docs")


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function, or of the constructor of a class."""

    positional: tuple[str, ...]
    """In order; they may be given by name, too."""
    required: frozenset[str]
    names: frozenset[str]
    takes_more: bool
    """It has *args."""
    takes_any_name: bool
    """It has **kwargs."""

    def fault(self, call: ast.Call) -> str | None:
        """What is wrong with the arguments of a call; None if nothing is, or nobody can tell."""
        given = [keyword.arg for keyword in call.keywords]
        if any(isinstance(argument, ast.Starred) for argument in call.args) or None in given:
            return None
        if len(call.args) > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments, not {len(call.args)}"
        names = {name for name in given if name is not None}
        if (unknown := names - self.names) and not self.takes_any_name:
            return f"has no parameter {', '.join(sorted(unknown))}"
        lacking = self.required - names - {*self.positional[: len(call.args)]}
        return f"needs {', '.join(sorted(lacking))}" if lacking else None


Names = dict[str, ast.AST]
"""What a file binds once: name -> its definition at the top level, or a node that tells nothing."""


@cache
def read(file: Path) -> tuple[Names, list[ast.Call]]:
    """The names that a file binds, and its calls by name."""
    return looked_at(file.read_text(encoding="utf-8"))


def looked_at(text: str) -> tuple[Names, list[ast.Call]]:
    """The same of a text. A name that is bound twice, anywhere in it, is left out."""
    tree = ast.parse(text)
    found, twice, calls = Names(), set[str](), list[ast.Call]()

    def bind(name: str, node: ast.AST) -> None:
        if name in found:
            twice.add(name)
        found[name] = node

    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bind(node.name, node if id(node) in at_top else ast.Pass())
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                bind(node.id, ast.Pass())
        elif isinstance(node, ast.arg):
            bind(node.arg, ast.Pass())
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bind(alias.asname or alias.name, node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.append(node)
    return {name: node for name, node in found.items() if name not in twice}, calls


def definitions(module: str) -> Names:
    """What a module of this repository binds."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return read(file)[0] if file.exists() else {}


def signature_of(name: str, bound: Names) -> Signature | None:
    """The signature of what `name` stands for in a file; None where reading it is not enough."""
    node = bound.get(name)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level or module.split(".")[0] not in FOLDERS:
            return None
        (original,) = [each.name for each in node.names if (each.asname or each.name) == name]
        return signature_of(original, definitions(module))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        changing = {ast.unparse(each).split("(")[0] for each in node.decorator_list}
        return _of_function(node) if changing <= KEEPING else None
    return _of_class(node) if isinstance(node, ast.ClassDef) else None


KEEPING = {"contextmanager", "asynccontextmanager", "cache", "lru_cache", "functools.cache"}
"""Decorators that leave the parameters as they are."""


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip: int = 0) -> Signature:
    of = node.args
    places = [each.arg for each in (*of.posonlyargs, *of.args)][skip:]
    num_needed = max(0, len(places) - len(of.defaults))
    by_name = [each.arg for each in of.kwonlyargs]
    needed = [name for name, at in zip(by_name, of.kw_defaults, strict=True) if at is None]
    return Signature(
        positional=tuple(places),
        required=frozenset([*places[:num_needed], *needed]),
        names=frozenset([*places, *by_name]),
        takes_more=of.vararg is not None,
        takes_any_name=of.kwarg is not None,
    )


@cache
def _of_class(node: ast.ClassDef) -> Signature | None:
    own = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    for each in own:
        if each.name == "__init__" and not each.decorator_list:
            return _of_function(each, skip=1)
    kinds = [each for each in node.decorator_list if "dataclass" in ast.unparse(each)]
    if len(kinds) != len(node.decorator_list) or not kinds or node.bases:
        return None
    settings = {
        keyword.arg for each in kinds if isinstance(each, ast.Call) for keyword in each.keywords
    }
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    shown = ast.unparse(node)
    if "init=False" in shown or "KW_ONLY" in shown or "InitVar" in shown or "ClassVar" in shown:
        return None
    names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
    needed = [
        each.target.id
        for each in fields
        if each.value is None and isinstance(each.target, ast.Name)
    ]
    needed += [
        each.target.id
        for each in fields
        if isinstance(each.target, ast.Name)
        and isinstance(each.value, ast.Call)
        and ast.unparse(each.value.func) == "field"
        and not {"default", "default_factory"} & {keyword.arg for keyword in each.value.keywords}
    ]
    return Signature(
        positional=() if "kw_only" in settings else tuple(names),
        required=frozenset(needed),
        names=frozenset(names),
        takes_more=False,
        takes_any_name=False,
    )


def wrong_calls(bound: Names, calls: list[ast.Call]) -> Iterator[str]:
    """`line: name what is wrong` of each call in a file."""
    for node in calls:
        assert isinstance(node.func, ast.Name)
        signature = signature_of(node.func.id, bound)
        if signature is not None and (fault := signature.fault(node)) is not None:
            yield f"{node.lineno}: {node.func.id} {fault}"


def test_calls_give_what_is_taken() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{fault}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not OF_OTHERS & {*file.parents}
        for fault in wrong_calls(*read(file))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("f(1, b=2)", None),
        ("f(1)", "needs b"),
        ("f(1, 2, b=3)", "takes 1 positional"),
        ("f(1, b=2, c=3)", "has no parameter c"),
        ("f(*anything)", None),
        ("f(**anything)", None),
        ("C(1)", None),
        ("C()", "needs x"),
        ("D(x=1)", None),
        ("D(1)", "takes 0 positional"),
        ("D(y=[])", "needs x"),
    ],
)
def test_the_walk_finds_what_it_is_for(call: str, fault: str | None) -> None:
    text = (
        "def f(a, *, b): ...\n"
        "class C:\n    def __init__(self, x, y=1): ...\n"
        "@dataclass(kw_only=True)\n"
        "class D:\n    x: int\n    y: list = field(default_factory=list)\n"
    )
    found = list(wrong_calls(*looked_at(text + call)))
    assert (fault in found[0]) if fault is not None else found == []
