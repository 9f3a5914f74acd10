"""Reads the arguments of a training command out of a shell script without running anything:
assignments, arrays, `${NAME:-default}`, `$((1024 * 2))`, continuations and comments. What only a
shell knows (`$(nproc)`, an environment variable) stays unchanged."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

PRIME = ("rl", "sft")
"""Programs of prime-rl that take a configuration, as in `rl @ FILE`."""
_ENDS = {"\n", ";", "&", "|", "&&", "||", ";;"}
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"}
_DECLARES = {"export", "readonly", "local", "declare"}
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"([A-Za-z_]\w*|[1-9])(?:\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*")
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+)?(\w+)[ \t]*\(\)", re.MULTILINE)
_POSITION = re.compile(r"\$\{?[1-9]\}?")
_CONTINUATION = "\r\n"
"""Pattern of a line continuation within quotes."""
_ARGUMENT = re.compile(r"--\w|\$\{\w+\[@\]\}|[\w+]+\.[\w.]+=")


@dataclass(frozen=True, slots=True)
class Word:
    """Represents one word of a script."""

    text: str
    line: int
    is_end: bool = False
    """True for a word that ends a statement, or opens or closes a list in parentheses."""
    file: str = ""
    """The file of the word, if other than the script that uses it."""


@dataclass(slots=True)
class Command:
    """Describes the command with which a script starts its training."""

    program: str = ""
    """The module or the file that it runs."""
    words: list[Word] = field(default_factory=list)
    """The arguments behind it."""
    unknown: list[str] = field(default_factory=list)
    """Arrays that the command uses and no file defines."""
    has_rest: bool = False
    """True if the command ends with the arguments of its function: `"$@"`."""
    loops: list[str] = field(default_factory=list)
    """Names of `for` loops that the command uses; each has the first of its values."""


def read_command(text: str, variables: dict[str, list[Word]]) -> Command:
    """Return the training command of a script: the Python command with the most arguments.
    `variables` holds those of scripts that were read before, and gets those of this one."""
    best, functions, loops = Command(), set(_FUNCTION.findall(text)), list[str]()
    for statement in _statements(text, variables):
        rest = list(itertools.dropwhile(lambda one: not _ARGUMENT.match(one.text), statement[1:]))
        if best.has_rest and rest and statement[0].text in functions:
            best.words, best.has_rest = best.words + rest, False
        if statement[0].text == "for" and len(statement) > 4:
            loops.append(statement[1].text)
        if best.words and _ARGUMENT.match(statement[0].text):  # a continuation that was forgotten
            statement = [Word("-m", 0), Word(best.program, 0), *best.words, *statement]
        for command in (_command(statement, variables), _nested_command(statement, variables)):
            if command is not None and len(command.words) > len(best.words):
                best = command
    numbers = {one.line for one in best.words if not one.file}
    used = " ".join(line for at, line in enumerate(text.splitlines(), 1) if at in numbers)
    best.loops = [name for name in loops if re.search(rf"\$\{{?{name}\b", used)]
    return best


def _nested_command(words: Sequence[Word], variables: dict[str, list[Word]]) -> Command | None:
    """Return the command of `bash -c "..."`, with the lines of the script; None without one."""
    for name, text in itertools.pairwise(words):
        if re.fullmatch(r"-\w*c", name.text) and " " in text.text:
            inner = read_command(text.text.replace(_CONTINUATION, "\\\n"), dict(variables))
            moved = [replace(one, line=one.line + text.line - 1) for one in inner.words]
            return Command(inner.program, moved, inner.unknown)
    return None


def _statements(text: str, variables: dict[str, list[Word]]) -> Iterator[list[Word]]:
    """Yield the words of each statement that is not an assignment; store assignments as
    variables."""
    words, array, is_kept, branches = list[Word](), None, True, _Branches()
    for word in _words(text, variables):
        if array is not None:
            if word.is_end and word.text == ")":
                array, branches.link = None, ")"
            elif not word.is_end and is_kept:
                variables[array].append(word)
            continue
        if word.is_end and word.text == "(" and words and _ASSIGNS.fullmatch(words[-1].text):
            match = _ASSIGNS.fullmatch(words.pop().text)
            assert match is not None
            array, is_kept = match[1], branches.is_read
            if is_kept and (not match[2] or array not in variables):
                variables[array] = []
            continue
        if not word.is_end:
            if words or not branches.passes(word.text):
                words.append(word)
            continue
        is_taken = branches.takes(words, word.text)
        is_plain = branches.is_read and not is_taken
        others = _without_assignments(words, variables) if is_plain else []
        branches.ends(words, word.text, is_done=not others and not is_taken)
        if others:
            yield others
        words = []


@dataclass(slots=True)
class _Branch:
    """Represents one branch of an `if` or a `case`, which is read or skipped."""

    is_read: bool = False
    chosen: bool | None = False
    """Whether an earlier branch was chosen; None if only a shell can decide."""
    test: bool | None = None
    """Whether the branch's own test chooses it."""
    is_test: bool = False
    """True while the test may continue, with `&&` or `||`."""
    subject: str | None = None
    """What a `case` compares."""
    patterns: list[str] | None = None
    """Patterns of a `case` up to the next `)`; None after it."""

    def decide(self, test: bool | None) -> None:
        """Record whether the branch is read."""
        self.test = test
        self.is_read = self.chosen is not True and test is not False


@dataclass(slots=True)
class _Branches:
    """Tracks the branches of `if`, `case`, `&&` and `||` around a place in the script. Reads all
    branches of a test that only a shell can decide."""

    open: list[_Branch] = field(default_factory=list)
    last: bool | None = None
    """Whether the previous command succeeded."""
    link: str = ""
    """What separates the previous command from this one: `&&`, `||`, or the first character of
    another separator."""
    depth: int = 0
    """Number of functions and `{}` around this place."""

    @property
    def is_read(self) -> bool:
        return all(one.is_read for one in self.open) and not (
            (self.link == "&&" and self.last is False) or (self.link == "||" and self.last is True)
        )

    def _texts(self, words: Sequence[Word]) -> list[str]:
        """Return the texts of words as in a script without arguments; a function may have some."""
        known = {"$#": "0", "${#}": "0"} if not self.depth else {}
        texts = [known.get(one.text, one.text) for one in words]
        return texts if self.depth else ["" if _POSITION.fullmatch(one) else one for one in texts]

    def passes(self, word: str) -> bool:
        """Take a keyword that stands alone. Return False for another word."""
        if word in ("fi", "esac") and self.open:
            self.open.pop()
        elif word == "else" and self.open:
            self.open[-1].is_read = True not in (self.open[-1].chosen, self.open[-1].test)
        return word in ("then", "else", "fi", "esac")

    def takes(self, words: Sequence[Word], end: str) -> bool:
        """Take `if` and `elif` with their tests, `case` with its patterns. Return False for another
        statement."""
        texts = self._texts(words)
        self.depth += (texts[:1] == ["{"]) - (texts[:1] == ["}"])
        texts = texts[1:] if texts[:1] in (["do"], ["{"]) else texts
        top = self.open[-1] if self.open else _Branch()
        match texts:
            case ["if", *test]:
                self.open.append(_Branch(is_test=True))
                self.open[-1].decide(_verdict(test))
            case ["elif", *test]:
                top.chosen, top.is_test = top.chosen or top.test, True
                top.decide(_verdict(test))
            case [_, *_] if top.is_test and self.link in ("&&", "||"):
                both, decides = {top.test, _verdict(texts)}, self.link == "||"
                top.decide(decides if decides in both else None if None in both else not decides)
            case ["case", _, "in", *patterns]:
                subject = words[len(words) - len(texts) + 1].text
                chosen = None if "$" in subject else False
                top = _Branch(chosen=chosen, subject=subject, patterns=patterns)
                self.open.append(top)
            case _ if top.patterns is not None:
                top.patterns += texts
            case _:
                top.is_test = top.is_test and not texts
                return False
        if top.patterns is not None and end == ")":
            fits = any(fnmatch.fnmatchcase(f"{top.subject}", one) for one in top.patterns)
            # without arguments, there is no option
            is_option = all(one.startswith("-") for one in top.patterns)
            top.decide(fits if top.chosen is not None else False if is_option else None)
            top.chosen, top.patterns = (
                top.chosen if top.chosen is None else top.chosen or fits,
                None,
            )
        return True

    def ends(self, words: Sequence[Word], end: str, *, is_done: bool) -> None:
        """Record whether a statement succeeded, and the separator that ends it."""
        if not words and self.link in ("&", "|") and end == self.link:
            self.link = end * 2
        elif words or self.link not in ("&&", "||"):  # else it goes on in the next line
            is_next = not words and end == ";" == self.link
            if is_next and self.open and self.open[-1].subject is not None:
                self.open[-1].patterns, self.open[-1].is_read = [], False
            if words and self.is_read:
                is_test = words[0].text in _TESTS
                self.last = _verdict(self._texts(words)) if is_test else is_done or None
            self.link = end


_COMPARES = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_TESTS = {"[": "]", "[[": "]]", "test": ""}
"""Commands that compare -> the word that closes them."""


def _verdict(words: Sequence[str]) -> bool | None:
    """Evaluate `[ a = b ]`, `[ -z a ]` and similar tests; None if only a shell can."""
    end = _TESTS.get(words[0], "") if words else None
    if end is None or (end and words[-1] != end) or words[0] not in _TESTS:
        return None
    match words[1 : -1 if end else None]:
        case ["!", *rest]:
            verdict = _verdict(["test", *rest])
            return None if verdict is None else not verdict
        case [("-z" | "-n") as test, value]:
            is_empty = not value or re.fullmatch(r"\$\{?\w+\}?", value) is not None
            return is_empty == (test == "-z")
        case [left, ("=" | "==" | "!=") as test, right] if "$" not in left + right:
            is_same = left == right or (words[0] == "[[" and fnmatch.fnmatchcase(left, right))
            return is_same == (test != "!=")
        case [left, test, right] if test in _COMPARES and left.isdecimal() and right.isdecimal():
            return bool(_COMPARES[test](int(left), int(right)))
    return None


def _without_assignments(words: list[Word], variables: dict[str, list[Word]]) -> list[Word]:
    """Store the assignments at the start of a command in `variables`, and return the remaining
    words. `A=1 B=2` sets both; `A=1 python x.py` sets A only for x.py, which makes no difference
    here. `for A in 1` sets A to the first value."""
    if [one.text for one in words[:3:2]] == ["for", "in"] and len(words) > 3:
        values = [one for word in words[3:] for one in _expand_variable(word, variables) or [word]]
        if not re.search(r"[$*]", values[0].text):
            variables[words[1].text] = values[:1]
        return [*words[:3], *values]
    at = 0
    while at < len(words):
        text = words[at].text
        if (match := _ASSIGNS.fullmatch(text)) and "." not in match[1]:
            if match[1] not in variables or not _POSITION.fullmatch(match[3]):
                before = variables.get(match[1], []) if match[2] else []
                value = " ".join(one.text for one in before) + match[3]
                variables[match[1]] = [Word(value, words[at].line)]
        elif text not in _KEYWORDS and text not in _DECLARES:
            break
        at += 1
    return words[at:]


def _expand_variable(word: Word, variables: dict[str, list[Word]]) -> list[Word] | None:
    """Return the words of a variable that is a whole word; None if the word is not a known
    variable."""
    match = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word.text)
    return variables.get(match[1]) if match is not None else None


def _command(words: Sequence[Word], variables: dict[str, list[Word]]) -> Command | None:
    """Return the part of a statement from its program on; None if it does not run Python."""
    expanded, unknown = list[Word](), list[str]()
    for word in words:
        if (values := _expand_variable(word, variables)) is not None:
            expanded += values
        elif match := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word.text):
            unknown.append(match[1])
        elif word.text not in ("$@", "$*"):
            expanded.append(word)
    has_rest = any(word.text == "$@" for word in words)
    for at, word in enumerate(expanded):
        rest = expanded[at + 1 :]
        if word.text == "-m" and rest:
            return Command(rest[0].text, rest[1:], unknown, has_rest)
        is_module = word.text.startswith("openrlhf.cli.")
        if (is_module or word.text.endswith(".py")) and not word.text.startswith("-"):
            return Command(word.text, _of_accelerate(expanded[:at]) + rest, unknown, has_rest)
        if word.text in PRIME and rest and re.match(r"@|--\w+[.-]\w|--\w+$", rest[0].text):
            return Command(f"prime-rl {word.text}", rest, unknown, has_rest)
        if word.text == "trl" and rest:
            return Command(f"trl {rest[0].text}", rest[1:], unknown, has_rest)
    return None


def _of_accelerate(words: Sequence[Word]) -> list[Word]:
    """Return the number of processes, if `accelerate launch` says it before the program."""
    texts = [one.text for one in words]
    if "accelerate" not in texts:
        return []
    spread = [part for one in words for part in one.text.split("=", 1)]
    at = spread.index("--num_processes") if "--num_processes" in spread[:-1] else None
    return [] if at is None else [Word(f"--num_processes={spread[at + 1]}", words[0].line)]


def _words(text: str, variables: dict[str, list[Word]]) -> Iterator[Word]:
    """Yield words, with quotes removed and variables replaced, and the ends of statements."""
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
    """Return the value of the word part that begins at `at`, and the index where it ends."""
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
                parts += (
                    text[at + 1] if is_escape else text[at : at + 2].replace("\\\n", _CONTINUATION)
                )
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
    """Expand `$NAME`, `${NAME:-default}` or `$((sum))`; `$(command)` stays."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "()")
        return _arithmetic(text[at + 3 : end - 2], text[at:end], variables), end
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
    """Return the text with quotes removed and variables replaced."""
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


def _arithmetic(text: str, otherwise: str, variables: dict[str, list[Word]]) -> str:
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
