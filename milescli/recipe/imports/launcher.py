"""Reads a launcher in Python that hands one text of arguments to `execute_train`, as those of Miles
do. Computes that text for the defaults of its settings class with a small evaluator, without
running or importing anything of the file; what only a run would know stays as `{its source}`."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from milescli.recipe.imports.shell import Command, Word

CALL = "execute_train"
_ARGUMENT, _SCRIPT = "train_args", "train_script"
_FALSE = "get_env_enable_infinite_run"
"""Function of Miles that returns False unless an environment variable is set."""
_FLAGS = re.compile(r"\{.*(?:args\(|--)")
"""Pattern of a placeholder for flags rather than for a value."""
_INHERITED = {"num_nodes": 1, "output_dir": "/root/shared_data", "extra_args": ""}
"""Defaults of the class that Miles's settings classes derive from."""
_MAX_STEPS, _MAX_DEPTH, _MAX_CHARACTERS, _MAX_BITS = 200_000, 40, 1_000_000, 1_000
"""Bounds on evaluated nodes, on nested calls, on the characters of a text, and on a number."""
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}
_COMPARES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (int, float, str, bool, min, max, len, abs, round)
}
_METHODS = ("strip", "lower", "upper", "startswith", "endswith", "replace", "split", "join", "get")


_ONE_WORD = str.maketrans({" ": "\u00a0", "\n": "\u00a0", "'": "\u2019", '"': "\u201d", "\\": None})
"""Translation that keeps a placeholder one word for the shell."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Represents a value that only a run knows."""

    source: str

    def __str__(self) -> str:
        return f"{{{self.source.translate(_ONE_WORD)}}}"


_RAISED = Unknown("raise")
"""Result of a function that raises."""


class _Returned(Exception):
    """Ends the evaluation of a function; holds the returned value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _BoundExceeded(Exception):
    """Reports that the evaluation reached a bound."""


class _Object(dict[str, Any]):
    """Represents an instance of one of the file's data classes: field name -> value."""

    def __init__(self, kind: ast.ClassDef | None, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.kind = kind


@dataclass(slots=True)
class _Launcher:
    """Holds the state of the evaluation of one file."""

    names: dict[str, Any] = field(default_factory=dict)
    """Values of the names of the module."""
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    text: str | None = None
    """Text of arguments that the file passes to `execute_train`."""
    script: str = CALL
    """What the call runs."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """First and last line of each statement that was evaluated."""
    undecided: list[int] = field(default_factory=list)
    """Lines of conditions whose value is unknown."""
    steps: int = 0
    depth: int = 0


def is_launcher(tree: ast.Module) -> bool:
    """Return True if the module calls `execute_train`, or a form of it for other devices."""
    return any(_is_call(node) for node in ast.walk(tree))


def read_launcher(
    tree: ast.Module, text: str, file: str, *, changes: Mapping[str, Any]
) -> tuple[Command, list[str]]:
    """Return the command with the line of each flag, and warnings. `changes`: values of fields of
    the settings class other than their defaults."""
    launcher, warnings = _Launcher(), list[str]()
    try:
        _evaluate(launcher, tree, changes)
    except (_BoundExceeded, RecursionError):
        warnings.append(f"{file} computes too much to be read to its end")
    if launcher.text is None:
        return Command(program=CALL), [*warnings, f"{file}: the arguments were not found"]
    warnings += [
        f"{file}:{line}: this condition depends on what only a run knows: its lines were not read"
        for line in dict.fromkeys(launcher.undecided)
    ]
    try:
        words = shlex.split(launcher.text.replace(str(_RAISED), " "))
    except ValueError:
        words = launcher.text.split()
    lines, made, line = text.splitlines(), list[Word](), 1
    for word in words:
        is_value = not made or made[-1].text.startswith("--")
        is_value = is_value and _FLAGS.match(word) is None
        if word.startswith("{") and word.endswith("}") and not is_value:
            warnings.append(f"{file}: only a run knows the arguments of {word}")
            continue
        if word.startswith("--"):
            line = _line_of(word.partition("=")[0], lines, launcher.ranges) or line
        made.append(Word(word, line))
    return Command(program=launcher.script, words=made), warnings


def evaluate_expression(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression whose names have these values; return Unknown if part of it
    is unknown."""
    try:
        value = _value(_Launcher(), node, dict(names))
    except (_BoundExceeded, RecursionError):
        return Unknown(ast.unparse(node))
    is_part = isinstance(value, str) and not isinstance(node, ast.Constant) and "{" in value
    return Unknown(ast.unparse(node)) if is_part or "Unknown(source=" in repr(value) else value


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith(CALL)


def _line_of(flag: str, lines: list[str], ranges: list[tuple[int, int]]) -> int:
    """Return the last evaluated line with the flag; return 0 if none has it, because code assembles
    the flag."""
    found = 0
    for number, line in enumerate(lines, 1):
        at = line.find(flag)
        is_whole = (
            at >= 0 and not line[at + len(flag) : at + len(flag) + 1].replace("-", "a").isalnum()
        )
        is_comment = line.lstrip().startswith("#")
        if is_whole and not is_comment and any(a <= number <= b for a, b in ranges):
            found = number
    return found


def _evaluate(launcher: _Launcher, tree: ast.Module, changes: Mapping[str, Any]) -> None:
    starts = list[ast.FunctionDef]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            launcher.functions[node.name] = node
            if any(_is_call(inner) for inner in ast.walk(node)):
                starts.append(node)
        elif isinstance(node, ast.ClassDef):
            launcher.classes[node.name] = node
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            _run(launcher, [node], launcher.names)
    for start in starts:
        given = [
            _instance(launcher, launcher.classes[kind], changes, inherited=_INHERITED)
            for one in start.args.args
            if (kind := ast.unparse(one.annotation) if one.annotation else "") in launcher.classes
        ]
        if launcher.text is None:
            _call_function(launcher, start, given)


def _instance(
    launcher: _Launcher,
    kind: ast.ClassDef,
    changes: Mapping[str, Any],
    *,
    inherited: Mapping[str, Any] | None = None,
) -> _Object:
    """Create an instance of a data class from its defaults and `changes` of its fields."""
    made = _Object(kind, inherited or {})
    for one in kind.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name = one.target.id
            made[name] = _value(launcher, one.value, launcher.names) if one.value else Unknown(name)
    made |= {name: value for name, value in changes.items() if name in made}
    for one in kind.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__post_init__":
            _call_function(launcher, one, [made])
    return made


def _call_function(launcher: _Launcher, function: ast.FunctionDef, given: list[Any]) -> Any:
    """Evaluate a function of the file; missing arguments get their defaults."""
    launcher.depth += 1
    if launcher.depth > _MAX_DEPTH:
        raise _BoundExceeded
    arguments = function.args
    local: dict[str, Any] = {}
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    defaults = arguments.defaults
    for name, node in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        local[name] = _value(launcher, node, launcher.names)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            local[one.arg] = _value(launcher, default, launcher.names)
    local |= dict(zip(names, given, strict=False))
    try:
        _run(launcher, function.body, launcher.names | local)
    except _Returned as returned:
        return returned.value
    finally:
        launcher.depth -= 1
    return None


def _run(launcher: _Launcher, body: list[ast.stmt], names: dict[str, Any]) -> None:
    for node in body:
        launcher.ranges += [(node.lineno, node.end_lineno or node.lineno)] * (
            not isinstance(node, ast.If | ast.Match | ast.For | ast.With | ast.Try)
        )
        match node:
            case ast.Assign(targets=[target]):
                _assign(launcher, target, _value(launcher, node.value, names), names)
            case ast.AnnAssign(value=ast.expr() as value):
                _assign(launcher, node.target, _value(launcher, value, names), names)
            case ast.AugAssign():
                added = ast.BinOp(_as_expression(node.target), node.op, node.value)
                source = ast.copy_location(added, node)
                _assign(launcher, node.target, _value(launcher, source, names), names)
            case ast.Expr():
                _value(launcher, node.value, names)
            case ast.Return():
                raise _Returned(_value(launcher, node.value, names) if node.value else None)
            case ast.Raise():
                raise _Returned(_RAISED)
            case ast.If():
                chosen = _value(launcher, node.test, names)
                if isinstance(chosen, Unknown):
                    launcher.undecided.append(node.lineno)
                else:
                    _run(launcher, node.body if chosen else node.orelse, names)
            case ast.Match():
                _run_case(launcher, node, names)
            case ast.With() | ast.Try():
                _run(launcher, node.body, names)
            case _:
                pass


def _run_case(launcher: _Launcher, node: ast.Match, names: dict[str, Any]) -> None:
    subject = _value(launcher, node.subject, names)
    if isinstance(subject, Unknown):
        launcher.undecided.append(node.lineno)
        return
    for case in node.cases:
        if case.guard is None and _matches(launcher, case.pattern, subject, names):
            _run(launcher, case.body, names)
            return


def _matches(
    launcher: _Launcher, pattern: ast.pattern, subject: Any, names: dict[str, Any]
) -> bool:
    match pattern:
        case ast.MatchOr():
            return any(_matches(launcher, one, subject, names) for one in pattern.patterns)
        case ast.MatchAs(pattern=None):
            if pattern.name is not None:
                names[pattern.name] = subject
            return True
        case ast.MatchValue():
            return bool(_value(launcher, pattern.value, names) == subject)
        case ast.MatchSingleton():
            return subject is pattern.value
        case ast.MatchSequence() if isinstance(subject, list):
            is_long = len(pattern.patterns) == len(subject)
            pairs = zip(pattern.patterns, subject, strict=False)
            return is_long and all(_matches(launcher, one, part, names) for one, part in pairs)
    return False


def _as_expression(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def _assign(launcher: _Launcher, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Attribute):
        owner = _value(launcher, target.value, names)
        if isinstance(owner, _Object):
            owner[target.attr] = value
    elif isinstance(target, ast.Tuple) and isinstance(value, list | tuple):
        for inner, one in zip(target.elts, value, strict=False):
            _assign(launcher, inner, one, names)


def _value(launcher: _Launcher, node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression, or Unknown."""
    launcher.steps += 1
    if launcher.steps > _MAX_STEPS:
        raise _BoundExceeded
    try:
        value = _evaluate_node(launcher, node, names)
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, AttributeError):
        return Unknown(ast.unparse(node))
    if isinstance(value, str) and len(value) > _MAX_CHARACTERS:
        raise _BoundExceeded
    return value


def _evaluate_node(launcher: _Launcher, node: ast.expr, names: dict[str, Any]) -> Any:
    def of(inner: ast.expr) -> Any:
        return _value(launcher, inner, names)

    unknown = Unknown(ast.unparse(node))
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names.get(node.id, unknown)
        case ast.JoinedStr():
            return "".join(_format_value(of, part) for part in node.values)
        case ast.List() | ast.Tuple():
            return [of(one) for one in node.elts]
        case ast.Dict():
            return {
                of(key): of(one) for key, one in zip(node.keys, node.values, strict=True) if key
            }
        case ast.IfExp():
            chosen = of(node.test)
            return (
                unknown if isinstance(chosen, Unknown) else of(node.body if chosen else node.orelse)
            )
        case ast.BoolOp():
            return _boolean_operation(of, node, unknown)
        case ast.UnaryOp():
            value = of(node.operand)
            if isinstance(value, Unknown):
                return unknown
            return not value if isinstance(node.op, ast.Not) else -value
        case ast.BinOp() if type(node.op) in _BINARY:
            return _binary_operation(of(node.left), node.op, of(node.right), unknown)
        case ast.Compare(ops=[op], comparators=[other]):
            left, right = of(node.left), of(other)
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return unknown
            return _COMPARES[type(op)](left, right)
        case ast.Subscript():
            owner, key = of(node.value), of(node.slice)
            return unknown if isinstance(key, Unknown) else owner[key]
        case ast.Attribute():
            return _attribute(launcher, of(node.value), node.attr, unknown)
        case ast.Call():
            return _call(launcher, node, names, unknown)
    return unknown


def _format_value(of: Callable[[ast.expr], Any], part: ast.expr) -> str:
    if not isinstance(part, ast.FormattedValue):
        return str(of(part))
    value = of(part.value)
    spec = of(part.format_spec) if part.format_spec is not None else ""
    is_wide = re.search(r"\d{4}", str(spec)) is not None
    return str(value) if isinstance(value, Unknown) or is_wide else format(value, spec)


def _boolean_operation(of: Callable[[ast.expr], Any], node: ast.BoolOp, unknown: Unknown) -> Any:
    is_or, value = isinstance(node.op, ast.Or), None
    for one in node.values:
        value = of(one)
        if isinstance(value, Unknown):
            return unknown
        if bool(value) == is_or:
            break
    return value


def _binary_operation(left: Any, op: ast.operator, right: Any, unknown: Unknown) -> Any:
    """Compute a binary operation. A text keeps its known parts; texts are not repeated."""
    if isinstance(op, ast.Add) and (isinstance(left, str) or isinstance(right, str)):
        return f"{left}{right}"
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return unknown
    is_counted = isinstance(left, int | float) and isinstance(right, int | float)
    if isinstance(op, ast.Mult | ast.Mod) and not is_counted:
        return unknown
    times = max(1, right) if isinstance(op, ast.Pow) and isinstance(right, int) else 1
    if isinstance(left, int) and left.bit_length() * times > _MAX_BITS:
        raise _BoundExceeded
    return _BINARY[type(op)](left, right)


def _attribute(launcher: _Launcher, owner: Any, name: str, unknown: Unknown) -> Any:
    if not isinstance(owner, _Object):
        return unknown
    if name in owner:
        return owner[name]
    for one in owner.kind.body if owner.kind is not None else ():
        if isinstance(one, ast.FunctionDef) and one.name == name and one.decorator_list:
            return _call_function(launcher, one, [owner])  # a property
    return unknown


def _call(launcher: _Launcher, node: ast.Call, names: dict[str, Any], unknown: Unknown) -> Any:
    given = [_value(launcher, one, names) for one in node.args]
    named = {one.arg: _value(launcher, one.value, names) for one in node.keywords if one.arg}
    called = ast.unparse(node.func)
    if _is_call(node):
        text = named.get(_ARGUMENT, given[0] if given else None)
        launcher.text = text if isinstance(text, str) else launcher.text
        launcher.script = str(named.get(_SCRIPT, CALL))
        return None
    if called in launcher.classes:
        kind = launcher.classes[called]
        fields = [ast.unparse(one.target) for one in kind.body if isinstance(one, ast.AnnAssign)]
        return _instance(launcher, kind, dict(zip(fields, given, strict=False)) | named)
    if called in launcher.functions:
        function = launcher.functions[called]
        order = [one.arg for one in function.args.args]
        places = [named.get(name, Unknown(name)) for name in order[len(given) :] if name in named]
        return _call_function(launcher, function, given + places)
    if called.endswith(_FALSE):
        return False
    if called in ("os.environ.get", "os.getenv"):
        return given[1] if len(given) > 1 else None
    if any(isinstance(one, Unknown) for one in given):
        return unknown
    if called in _FUNCTIONS:
        return _FUNCTIONS[called](*given)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        owner = _value(launcher, node.func.value, names)
        length = max((len(one) for one in given if isinstance(one, str | list)), default=1)
        if isinstance(owner, str) and len(owner) * length > _MAX_CHARACTERS:
            raise _BoundExceeded
        if isinstance(owner, str | dict) and not isinstance(owner, _Object):
            return getattr(owner, node.func.attr)(*given)
    return unknown
