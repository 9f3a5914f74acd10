"""Splits asserts into questions, which are evaluated together with the response's code, and
comparisons of the values, which run without that code. Pure; used by the reward `code`.

`assert abs(area(2) - 12.57) < 0.01` becomes the question `area(2)`, evaluated with the response's
code, and `abs(_v0 - 12.57) < 0.01`, judged in another sandbox. What a test sets up from plain
values is sent to the code only if a question needs it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_RESPONSE_MODULES = frozenset({"solution", "main"})
"""Module names by which tests import the response."""
_MISSING_MODULES = frozenset({"pytest", "unittest"})
_RESPONSE_NAME = "_response_"
"""Prefix of a name of the response that the tests have, too."""
_CHAINS = (ast.Call, ast.Attribute, ast.Subscript)
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
Step = dict[str, Any]


class Ungradable(ValueError):
    """Says why an assert cannot be split."""


@dataclass(slots=True)
class SplitAsserts:
    """Holds the steps for the harness."""

    response_steps: list[Step] = field(default_factory=list)
    """Steps that run together with the code of the response."""
    judge_steps: list[Step] = field(default_factory=list)
    """Steps that run without the response. In a `judge` step, `values` maps a name to the step of
    `response_steps` that gives its value."""

    @property
    def num_asserts(self) -> int:
        """Return the number of asserts of all tests."""
        return sum("judge" in step for step in self.judge_steps)


def split_asserts(tests: Sequence[str]) -> SplitAsserts:
    """Split all tests of a label. Raises Ungradable."""
    statements = list[ast.stmt]()
    for number, text in enumerate(tests):
        try:
            statements += _inline_tests(ast.parse(text).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Ungradable(f"assert {number + 1} is not valid Python: {error}") from None
    splitter = _Splitter(statements)
    for statement in statements:
        splitter.add(statement)
    if not splitter.steps.num_asserts:
        raise Ungradable("it asserts nothing")
    return splitter.steps


def _inline_tests(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, with test functions replaced by their bodies."""
    for statement in body:
        is_test = isinstance(statement, ast.FunctionDef) and statement.name.startswith("test")
        if is_test and not statement.args.args and not statement.decorator_list:
            yield from _inline_tests(statement.body)
        else:
            yield statement


@dataclass(slots=True)
class _Splitter:
    """Splits the statements of a label one after the other."""

    statements: Sequence[ast.stmt]
    steps: SplitAsserts = field(default_factory=SplitAsserts)
    known: set[str] = field(default_factory=lambda: set(dir(builtins)))
    """Names that have the same value in both places."""
    bound: set[str] = field(default_factory=set)
    """Names that the tests define, not the response."""
    own: list[tuple[frozenset[str], str]] = field(default_factory=list)
    """Statements of plain values that were not sent yet: the names in them, and their text."""
    modules: set[str] = field(default_factory=set)
    """Names by which the tests import the response as a module."""
    own_names: set[str] = field(default_factory=set)
    """Names that the tests bind anywhere; known as soon as they import a module."""

    def add(self, statement: ast.stmt) -> None:
        """Split one more statement. Raises Ungradable."""
        if self.modules:
            self._name_directly(statement)
        if isinstance(statement, ast.Assert):
            self._assert(statement.test)
            return
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            raise Ungradable(
                f"an assert stands inside of `{ast.unparse(statement).splitlines()[0]}`, where it "
                "cannot be parted from the values that it expects"
            )
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement)
            return
        text, reads, writes = (
            ast.unparse(statement),
            names_read(statement),
            names_assigned(statement),
        )
        self.bound |= writes
        if reads <= self.known | writes:
            self.own.append((frozenset(reads | writes), text))
            self.steps.judge_steps.append({"do": text})
            self.known |= writes
        else:
            self._send(reads | writes)
            self.known -= writes
            self.steps.response_steps.append({"do": text})

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import) and len(statement.names) > 1:
            for alias in statement.names:
                self._import(ast.Import(names=[alias]))
            return
        is_module = isinstance(statement, ast.Import)
        module = statement.names[0].name if is_module else statement.module or ""
        if module.split(".")[0] in _RESPONSE_MODULES:
            if is_module and "." in module:
                raise Ungradable(f"it imports {module}, but the response is a single module")
            for alias in statement.names:
                self._import_response(alias, is_module=is_module)
            return
        if module.split(".")[0] in _MISSING_MODULES:
            raise Ungradable(f"it imports {module}, which is not in the sandbox")
        writes = {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        step = {"do": ast.unparse(statement)}
        self.steps.response_steps.append(step)
        self.steps.judge_steps.append(step)
        self.known |= writes
        self.bound |= writes

    def _import_response(self, alias: ast.alias, *, is_module: bool) -> None:
        """Give the response, or a name of it, the name by which the tests import it."""
        name = alias.asname or alias.name
        self.known.discard(name)  # a function `sum` of the response is not the built-in one
        self.bound.discard(name)
        if is_module:
            self._add_module(name)
        elif name != alias.name:
            self.steps.response_steps.append({"do": f"{name} = {alias.name}"})

    def _add_module(self, name: str) -> None:
        """Let the tests use the response by the name of a module."""
        self.modules.add(name)
        self.own_names = set().union(*map(names_assigned, self.statements))
        nodes = [node for statement in self.statements for node in ast.walk(statement)]
        self.own_names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        named = [node for node in nodes if self._is_in_module(node)]
        for attribute in sorted({node.attr for node in named} & self.own_names):
            step = {"do": f"{_RESPONSE_NAME}{attribute} = {attribute}"}
            self.steps.response_steps.append(step)
        within = {id(node.value) for node in named}
        is_alone = any(
            isinstance(node, ast.Name) and node.id == name and id(node) not in within
            for node in nodes
        )
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        is_own = any(alias.name in (name, "*") for each in imports for alias in each.names)
        if is_alone and not is_own:  # such as hasattr(solution, "add")
            namespace = '__import__("types").SimpleNamespace(**globals())'
            self.steps.response_steps.append({"do": f"{name} = {namespace}"})

    def _is_in_module(self, node: object) -> bool:
        """Return True for `solution.add`."""
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in self.modules
            and node.value.id not in self.bound
        )

    def _name_directly(self, statement: ast.stmt) -> None:
        """Replace `solution.add` in the statement by `add`, as it runs in the response's module; by
        another name if the tests have an `add` of their own."""
        for node in ast.walk(statement):
            for field_name, value in ast.iter_fields(node):
                inner = value if isinstance(value, list) else [value]
                named = [self._without_module(one) for one in inner]
                setattr(node, field_name, named if isinstance(value, list) else named[0])

    def _without_module(self, node: object) -> object:
        if not self._is_in_module(node):
            return node
        assert isinstance(node, ast.Attribute)
        if node.attr in self.own_names:
            return ast.Name(id=f"{_RESPONSE_NAME}{node.attr}", ctx=node.ctx)
        self.known.discard(node.attr)
        return ast.Name(id=node.attr, ctx=node.ctx)

    def _send(self, names: set[str]) -> None:
        """Send the tests' own values that a question needs. From then on the response may change
        them."""
        needed, size = names - set(dir(builtins)), -1
        while len(needed) != size:
            size = len(needed)
            for mentioned, _ in self.own:
                needed |= mentioned - set(dir(builtins)) if mentioned & needed else set()
        self.steps.response_steps += [
            {"do": text} for mentioned, text in self.own if mentioned & needed
        ]
        for mentioned, text in self.own:
            self.known -= names_assigned(ast.parse(text)) if mentioned & needed else set()
        self.own = [one for one in self.own if not one[0] & needed]

    def _assert(self, test: ast.expr) -> None:
        values: dict[str, int] = {}
        try:
            judged = self._split(test, values, within=frozenset())
        except _UncalledFunction:
            judged = self._question(test, values)
        self.steps.judge_steps.append({"judge": ast.unparse(judged), "values": values})

    def _split(
        self, node: ast.AST, values: dict[str, int], *, within: frozenset[str]
    ) -> ast.expr | Any:
        """Return `node` with its questions replaced by names. `within`: names that enclosing
        comprehensions bind."""
        if not isinstance(node, ast.AST) or names_read(node) <= self.known | within:
            return node
        if isinstance(node, _SCOPES):
            within |= names_assigned(node) | {
                one.arg for one in ast.walk(node) if isinstance(one, ast.arg)
            }
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if self._is_foreign(node) or (operands and all(map(self._is_foreign, operands))):
            if isinstance(node, ast.Name) and node.id not in self.bound:
                raise _UncalledFunction  # a function or class of the response as such
            if inner := names_read(node) & within - self.bound:
                raise Ungradable(
                    f"`{ast.unparse(node)}` is called inside of a loop, over {', '.join(inner)}"
                )
            return self._question(node, values)
        count = len(self.steps.response_steps), dict(values)
        try:
            for name, child in ast.iter_fields(node):
                if isinstance(child, list):
                    parted = [self._split(one, values, within=within) for one in child]
                    setattr(node, name, parted)
                else:
                    setattr(node, name, self._split(child, values, within=within))
        except _UncalledFunction:
            if not isinstance(node, ast.Call) or names_read(node) & within:
                raise
            del self.steps.response_steps[count[0] :]
            values.clear()
            values.update(count[1])
            return self._question(node, values)
        return node

    def _is_foreign(self, node: ast.AST) -> bool:
        """Return True for a name of the response, or a chain of calls that begins with one."""
        while isinstance(node, _CHAINS):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id not in self.known

    def _question(self, node: ast.expr, values: dict[str, int]) -> ast.expr:
        self._send(names_read(node))
        name = f"_v{len(self.steps.response_steps)}"
        values[name] = len(self.steps.response_steps)
        self.steps.response_steps.append({"value": ast.unparse(node)})
        return ast.Name(id=name, ctx=ast.Load())


class _UncalledFunction(Exception):
    """Reports that a function of the response is used without being called: the enclosing call is
    tested."""


def names_read(node: ast.AST) -> set[str]:
    """Return the names that a piece of Python reads, without parameters of functions in it."""
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)
    } - {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}


def names_assigned(node: ast.AST) -> set[str]:
    """Return the names that a piece of Python assigns or defines."""
    made = {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return made | {one.name for one in ast.walk(node) if isinstance(one, kinds)}
