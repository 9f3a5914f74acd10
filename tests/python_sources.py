"""What the Python files of this repository bind, import and call: each is read once for all rules
about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("milescli", "tests", "bench", "docs")
OF_OTHERS = {ROOT / "bench/gpu/parts", ROOT / "bench/gpu/site"}
"""Packages, where bench/gpu/pack.sh and unpack.sh have run."""


class Call(NamedTuple):
    """A call by name, of which each argument is told."""

    line: int
    function: str
    num_positional: int
    names: tuple[str, ...]


class Imported(NamedTuple):
    """A name that is imported from a module."""

    line: int
    module: str
    name: str


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

    def fault(self, call: Call) -> str | None:
        """What is wrong with the arguments of a call; None if nothing is."""
        if call.num_positional > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments, not {call.num_positional}"
        names = {*call.names}
        if (unknown := names - self.names) and not self.takes_any_name:
            return f"has no parameter {', '.join(sorted(unknown))}"
        lacking = self.required - names - {*self.positional[: call.num_positional]}
        return f"needs {', '.join(sorted(lacking))}" if lacking else None


@dataclass(slots=True)
class Source:
    """One file. No node of its tree is held: the garbage collector would visit them again and
    again."""

    bound: dict[str, Signature | Imported | None] = field(default_factory=dict)
    """What it binds once; None: reading is not enough to tell how it is called."""
    names: set[str] = field(default_factory=set)
    """All that it binds, parameters aside."""
    imports: list[Imported] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def files() -> Iterator[Path]:
    """The files of this repository, without those of others."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not OF_OTHERS & {*file.parents}:
                yield file


@cache
def read(file: Path) -> Source:
    """What a file binds, imports and calls."""
    return source_of(file.read_text(encoding="utf-8"))


def source_of(text: str) -> Source:
    """The same of a text."""
    tree = ast.parse(text)
    found, twice = Source(), set[str]()

    def bind(name: str, meaning: Signature | Imported | None = None) -> None:
        if name in found.bound:
            twice.add(name)
        found.bound[name] = meaning

    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bind(node.name, _signature_of(node) if id(node) in at_top else None)
            found.names.add(node.name)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                bind(node.id)
                found.names.add(node.id)
        elif isinstance(node, ast.arg):
            bind(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                found.names.add(name.split(".")[0])
                if isinstance(node, ast.ImportFrom):
                    module = "." * node.level + (node.module or "")
                    found.imports.append(Imported(node.lineno, module, alias.name))
                    bind(name, found.imports[-1])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [keyword.arg for keyword in node.keywords]
            if not any(isinstance(one, ast.Starred) for one in node.args) and None not in names:
                names_told = tuple(name for name in names if name is not None)
                found.calls.append(Call(node.lineno, node.func.id, len(node.args), names_told))
    for name in twice:
        del found.bound[name]
    return found


def _signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Signature | None:
    if isinstance(node, ast.ClassDef):
        return _of_class(node)
    changing = {ast.unparse(each).split("(")[0] for each in node.decorator_list}
    return _of_function(node) if changing <= KEEPING else None


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
