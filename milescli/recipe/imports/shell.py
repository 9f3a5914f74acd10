"""Reads the arguments of a training command out of a shell script, without running anything:
assignments, arrays, `${NAME:-default}`, `$((1024 * 2))`, continuations and comments. What only a
shell knows (`$(nproc)`, a variable of the environment) stays as it is written."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

_ENDS = {"\n", ";", "&", "|", "&&", "||", ";;"}
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"}
_DECLARES = {"export", "readonly", "local", "declare"}
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*")
_GOES_ON = "\r\n"
"""A continuation within quotes."""
_ARGUMENT = re.compile(r"--\w|\$\{\w+\[@\]\}|[\w+]+\.[\w.]+=")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a script."""

    text: str
    line: int
    is_end: bool = False
    """It ends a statement, or opens or closes a list in parentheses."""


@dataclass(slots=True)
class Command:
    """The command with which a script begins its training."""

    program: str = ""
    """The module or the file that is run."""
    words: list[Word] = field(default_factory=list)
    """The arguments behind it."""
    unknown: list[str] = field(default_factory=list)
    """Arrays that it uses and that no file defines."""


def read_command(text: str, variables: dict[str, list[Word]]) -> Command:
    """Return the training command of a script: the Python command with the most arguments.
    `variables`: those of scripts that were read before; grows."""
    best = Command()
    for statement in _statements(text, variables):
        if best.words and _ARGUMENT.match(statement[0].text):  # a continuation that was forgotten
            statement = [Word("-m", 0), Word(best.program, 0), *best.words, *statement]
        for command in (_command(statement, variables), _in_another_shell(statement, variables)):
            if command is not None and len(command.words) > len(best.words):
                best = command
    return best


def _in_another_shell(words: Sequence[Word], variables: dict[str, list[Word]]) -> Command | None:
    """Return the command of `bash -c "..."`, with the lines of the script; None without one."""
    for name, text in itertools.pairwise(words):
        if re.fullmatch(r"-\w*c", name.text) and " " in text.text:
            inner = read_command(text.text.replace(_GOES_ON, "\\\n"), dict(variables))
            moved = [replace(one, line=one.line + text.line - 1) for one in inner.words]
            return Command(inner.program, moved, inner.unknown)
    return None


def _statements(text: str, variables: dict[str, list[Word]]) -> Iterator[list[Word]]:
    """Yield the words of each statement that is no assignment; assignments become variables."""
    words, array, branches = list[Word](), None, _Branches()
    for word in _words(text, variables):
        if array is not None:
            if word.is_end and word.text == ")":
                array = None
            elif not word.is_end and branches.is_read:
                variables[array].append(word)
            continue
        if word.is_end and word.text == "(" and words and _ASSIGNS.fullmatch(words[-1].text):
            match = _ASSIGNS.fullmatch(words.pop().text)
            assert match is not None
            array = match[1]
            if branches.is_read and (not match[2] or array not in variables):
                variables[array] = []
            continue
        if not word.is_end:
            if words or not branches.passes(word.text):
                words.append(word)
            continue
        is_test = branches.begins(words)
        if branches.is_read and not is_test and (words := _without_assignments(words, variables)):
            yield words
        words = []
    if branches.is_read and (words := _without_assignments(words, variables)):
        yield words


@dataclass(slots=True)
class _Branches:
    """The branches of `if` that a place in the script is in. A test that only a shell can decide
    leaves all of its branches readable."""

    open: list[tuple[bool, bool | None]] = field(default_factory=list)
    """Each says whether it is read, and whether its `if` has chosen one: None if undecided."""

    @property
    def is_read(self) -> bool:
        return all(is_read for is_read, _ in self.open)

    def passes(self, word: str) -> bool:
        """Take a keyword that stands alone. Return False for another word."""
        if word == "fi" and self.open:
            self.open.pop()
        elif word == "else" and self.open:
            self.open[-1] = (self.open[-1][1] is not True, self.open[-1][1])
        return word in ("then", "else", "fi")

    def begins(self, words: Sequence[Word]) -> bool:
        """Take `if` and `elif` with their tests. Return False for another statement."""
        keyword = words[0].text if words else ""
        if keyword == "if":
            verdict = _verdict(words[1:])
            self.open.append((verdict is not False, verdict))
        elif keyword == "elif" and self.open:
            chosen = self.open.pop()[1]
            verdict = _verdict(words[1:])
            self.open.append((chosen is not True and verdict is not False, chosen or verdict))
        return keyword in ("if", "elif")


_COMPARES = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _verdict(words: Sequence[Word]) -> bool | None:
    """Decide `[ a = b ]`, `[ -z a ]` and their kin; None if only a shell can."""
    texts = [one.text for one in words]
    if len(texts) < 2 or (texts[0], texts[-1]) not in {("[", "]"), ("[[", "]]")}:
        return None
    match texts[1:-1]:
        case [("-z" | "-n") as test, value]:
            is_empty = not value or re.fullmatch(r"\$\{?\w+\}?", value) is not None
            return is_empty == (test == "-z")
        case [left, ("=" | "==" | "!=") as test, right] if "$" not in left + right:
            return (left == right) == (test != "!=")
        case [left, test, right] if test in _COMPARES and left.isdecimal() and right.isdecimal():
            return bool(_COMPARES[test](int(left), int(right)))
    return None


def _without_assignments(words: list[Word], variables: dict[str, list[Word]]) -> list[Word]:
    """`A=1 B=2` sets both; `A=1 python x.py` sets A for x.py alone, which is as good."""
    at = 0
    while at < len(words):
        text = words[at].text
        if (match := _ASSIGNS.fullmatch(text)) and "." not in match[1]:
            variables[match[1]] = [Word(match[3], words[at].line)]
        elif text not in _KEYWORDS and text not in _DECLARES:
            break
        at += 1
    return words[at:]


def _command(words: Sequence[Word], variables: dict[str, list[Word]]) -> Command | None:
    """Return the part of a statement from its program on; None where it runs no Python."""
    expanded, unknown = list[Word](), list[str]()
    for word in words:
        if (match := re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word.text)) is None:
            expanded.append(word)
        elif match[1] in variables:
            expanded += variables[match[1]]
        elif "[" in word.text:
            unknown.append(match[1])
        elif word.text not in ("$@", "$*"):
            expanded.append(word)
    for at, word in enumerate(expanded):
        if word.text == "-m" and at + 1 < len(expanded):
            return Command(expanded[at + 1].text, expanded[at + 2 :], unknown)
        is_module = word.text.startswith("openrlhf.cli.")
        if (is_module or word.text.endswith(".py")) and not word.text.startswith("-"):
            return Command(word.text, expanded[at + 1 :], unknown)
        if word.text in ("trl", "rl") and at + 1 < len(expanded):
            return Command(f"trl {expanded[at + 1].text}", expanded[at + 2 :], unknown)
    return None


def _words(text: str, variables: dict[str, list[Word]]) -> Iterator[Word]:
    """Yield words with quotes removed and variables replaced, and the ends of statements."""
    at, line, current, has_word = 0, 1, "", False
    begin = 1
    while at < len(text):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            if text[at + 1] == "\n":
                at, line = at + 2, line + 1
                continue
            current, has_word, at = current + text[at + 1], True, at + 2
            continue
        if char == "#" and not has_word:
            while at < len(text) and text[at] != "\n":
                at += 1
            continue
        if char in " \t\r\n;&|()" or (char == "<" and _HEREDOC.match(text, at)):
            if has_word:
                yield Word(current, begin)
                current, has_word = "", False
            if char == "<":
                match = _HEREDOC.match(text, at)
                assert match is not None
                at = match.end()
                continue
            if char not in " \t\r":
                yield Word(char, line, is_end=True)
            line += char == "\n"
            at += 1
            continue
        begin = begin if has_word else line
        piece, end = _piece(text, at, variables)
        line += text.count("\n", at, end)
        is_split = char == "$" and not piece.startswith("$") and "$(" not in piece
        if is_split and not _ASSIGNS.match(current):
            # without quotes, a value is several words
            first, *others = re.split(r"\s+", piece)
            for other in others:
                if current + first:
                    yield Word(current + first, begin)
                current, first = "", other
            piece = first
        current, has_word, at = current + piece, True, end
    if has_word:
        yield Word(current, begin)
    yield Word("\n", line, is_end=True)


def _piece(text: str, at: int, variables: dict[str, list[Word]]) -> tuple[str, int]:
    """Return the value of what begins at `at`, and where it ends."""
    char = text[at]
    if char == "'":
        end = text.find("'", at + 1)
        end = len(text) if end < 0 else end
        return text[at + 1 : end], end + 1
    if char == '"':
        parts, at = "", at + 1
        while at < len(text) and text[at] != '"':
            if text[at] == "\\" and at + 1 < len(text):
                is_escape = text[at + 1] in '"\\$`'
                parts += text[at + 1] if is_escape else text[at : at + 2].replace("\\\n", _GOES_ON)
                at += 2
            else:
                piece, at = _piece(text, at, variables) if text[at] == "$" else (text[at], at + 1)
                parts += piece
        return parts, at + 1
    if char == "$":
        return _expanded(text, at, variables)
    if char == "`":
        end = text.find("`", at + 1)
        end = len(text) if end < 0 else end + 1
        return text[at:end], end
    return char, at + 1


def _expanded(text: str, at: int, variables: dict[str, list[Word]]) -> tuple[str, int]:
    """Of `$NAME`, `${NAME:-default}`, `$((sum))`; `$(command)` stays."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "()")
        return _sum(text[at + 3 : end - 2], text[at:end], variables), end
    if text.startswith("$(", at):
        end = _closing(text, at + 1, "()")
        return text[at:end], end
    if text.startswith("${", at):
        end = _closing(text, at + 1, "{}")
        match = _BRACED.fullmatch(text[at + 2 : end - 1])
        if match is None:
            return text[at:end], end
        if "[" in text[at:end]:
            return text[at:end], end  # an array: expanded where the command is read
        if match[1] in variables:
            return " ".join(word.text for word in variables[match[1]]), end
        return (text[at:end] if match[2] is None else _text(match[2], variables)), end
    match = _NAME.match(text, at + 1)
    if match is None:
        return text[at : at + 2], at + 2
    if match[0] in variables and len(variables[match[0]]) == 1:
        return variables[match[0]][0].text, match.end()
    return text[at : match.end()], match.end()


def _text(text: str, variables: dict[str, list[Word]]) -> str:
    """With quotes removed and variables replaced."""
    parts, at = "", 0
    while at < len(text):
        piece, at = _piece(text, at, variables) if text[at] in "$\"'" else (text[at], at + 1)
        parts += piece
    return parts


def _closing(text: str, at: int, pair: str) -> int:
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] == pair[0]) - (text[end] == pair[1])
        if not depth:
            return end + 1
    return len(text)


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _sum(text: str, otherwise: str, variables: dict[str, list[Word]]) -> str:
    """Return the value of whole numbers, names of such and + - * / %; what is none of these
    stays."""

    def named(match: re.Match[str]) -> str:
        words = variables.get(match[0], [])
        return words[0].text if len(words) == 1 else match[0]

    text = _NAME.sub(named, _text(text, variables))

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return otherwise
