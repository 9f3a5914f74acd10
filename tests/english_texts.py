"""Every text that the program shows to its users, read from the source: help of verbs, flags and
recipe keys, errors, warnings, diagnoses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "milescli"
SHOWN_BY = {"warn", "note", "BadParameter", "Row", "Choice", "Refusal"}
"""Functions, methods and classes whose texts are shown as they are."""
ERROR_KEYWORDS = {"what", "why", "fix"}
SHOWN_KEYWORDS = ERROR_KEYWORDS | {"help", "action", "evidence", "advice", "meaning", "reason"}

FORBIDDEN = (
    r"^Of (?!course)",  # a fragment without a subject
    r"\bwithout (your|its|a) word\b",
    r"\bbears? (its|the|their) contract\b",
    r"\bin vain\b",
    r"\b(is|are) told of\b",
    r"\bof yours\b",
    r"\bwhether so many\b|\bso many times\b|\bso long\b|\bso far as\b",
    r"\bby name and line\b|\brefused by name\b|\bheld against\b",
    r"(\bit|\bthis|\bthat|`|\{\}) is no (?!longer|more|less|fewer|better|such)",
    r"\bno \w+ (is|are) called\b",
    r"\bthere already\b",
    r"\b(is|are) not there\b(?! yet)",
    r"\bmend(s|ed)?\b",
    r"\b(be|is|are) had\b",
    r"\b(begins?|begun|made|written|read|played) anew\b|\bbegins? again\b",
    r"\bheed(s|ed)?\b|\bspoilt\b",
    r"\b(is|are|was|were) asked\b(?! (for|to)\b)",
    r"\b(stands?|stood) (in|there|behind|beside)\b|\bmust stand\b",
    r"\bin silence\b|\bin good order\b|\bin any case\b",
    r"\bat the (most|least)\b|\bby (itself|themselves) alone\b",
    r"\bnot rightly\b|\bas ever\b|\bwritten nowhere\b",
    r"\bwhat is (there|asked|wanted|meant)\b|\bwhose is (it|the)\b",
    r"\bare wanted\b|\bis wanted\b",
    r"\bgave (\{\}|what|no|back)\b|\bit gave\b",
    r"\bpoint at\b|\btake (one|it|them) (of|out|off)\b|\bleave (one )?out\b",
    r"\bcannot do without\b|\bnothing else than\b|\bnone of (\{\}|`)",
    r"\bclash(es)?\b|\bgo(es)? on with\b|\blook into\b",
)
"""Phrases of the old dialect, as regular expressions. Each is precise enough that correct English
does not match it."""


def texts_of_the_program() -> Iterator[tuple[str, str]]:
    """Yield each text with the file and line where it stands: (a) docstrings and help of verbs and
    flags, (b) docstrings of recipe keys, (c) errors, warnings and diagnoses. A placeholder of an
    f-string is `{}`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        where = path.relative_to(ROOT).as_posix()
        if path.is_relative_to(PACKAGE / "commands"):
            yield from _docstrings_of_verbs(where, tree)
        if path.is_relative_to(PACKAGE / "recipe"):
            yield from _docs_of_keys(where, tree)
        yield from _shown(where, tree)


def _docstrings_of_verbs(where: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            argument.arg == "context" for argument in node.args.args
        ):
            yield f"{where}:{node.lineno}", " ".join((ast.get_docstring(node) or "").split())


def _docs_of_keys(where: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for section in tree.body:
        if not isinstance(section, ast.ClassDef):
            continue
        doc = ast.get_docstring(section)
        if doc:
            yield f"{where}:{section.lineno}", " ".join(doc.split())
        for before, node in zip(section.body, section.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(node, ast.Expr):
                text = _text(node.value)
                if text:
                    yield f"{where}:{node.lineno}", " ".join(text.split())


def _shown(where: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [value for key, value in keywords.items() if key in SHOWN_KEYWORDS]
        if name in SHOWN_BY or {"why", "fix"} & keywords.keys() or name.endswith("Error"):
            values += node.args
        for value in values:
            for line, text in _texts(value):
                yield f"{where}:{line}", text


def _texts(value: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield the texts of an expression: of each branch and of each element."""
    text = _text(value)
    if text is not None:
        yield value.lineno, text
    else:
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr) and not isinstance(value, ast.Call | ast.Subscript):
                yield from _texts(part)


def _text(value: ast.expr) -> str | None:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in value.values
        )
    return None


if __name__ == "__main__":
    for where, text in texts_of_the_program():
        print(f"{where}: {text}")
