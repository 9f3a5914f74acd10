"""Every command within a `fix:` of the source exists: verbs and options are those of the command
line, keys those of a recipe. Values that a text is filled with are not known here."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import milescli
from milescli.commands.app import app
from milescli.recipe.keys import keys, sections

PACKAGE = Path(milescli.__file__).parent
HOLE = "\0"
"""Stands for a value that is filled in."""
_COMMAND = re.compile(r"(?:^|(?<=[`;(:] )|(?<=[`(]))miles [a-z]")
_OWN_KEYS = re.compile(r"(engines\.extra|.*\.settings|rollout\.(roles|mcp)\.|run\.trackers)")


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be, with holes in place of values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    elif isinstance(node, ast.List | ast.Tuple):
        for one in node.elts:
            yield from _texts(one.value if isinstance(one, ast.Starred) else one)
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))
    elif isinstance(node, ast.BinOp):
        yield from (*_texts(node.left), *_texts(node.right))
    elif isinstance(node, ast.BoolOp):
        for one in node.values:
            yield from _texts(one)


def _fixes() -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of each `fix=` and `fixes=`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                for word in node.keywords:
                    if word.arg in ("fix", "fixes"):
                        for text in _texts(word.value):
                            yield f"{path.relative_to(PACKAGE)}:{word.value.lineno}", text


FIXES = sorted(set(_fixes()))


@cache
def _commands() -> Any:
    from typer.main import get_command

    return get_command(app)


def _fault_of_command(words: list[str]) -> str:
    """Say what does not exist of a command line, whose first word is `miles`; empty if all does."""
    place, path = _commands(), ["miles"]
    while hasattr(place, "commands"):
        name = words[len(path)] if len(path) < len(words) else ""
        if HOLE in name or not re.fullmatch(r"[a-z][a-z-]*", name):
            return ""
        if name not in place.commands:
            return f"`{' '.join(path)}` has no `{name}`"
        place = place.commands[name]
        path.append(name)
    known = {option for one in place.params for option in (*one.opts, *one.secondary_opts)}
    given = [word.partition("=")[0] for word in words if word.startswith("-") and HOLE not in word]
    odd = [word for word in given if word not in known | {"--help"} and re.search("[a-z]", word)]
    return f"`{' '.join(path)}` has no option {odd[0]}" if odd else ""


def _fault_of_set(text: str) -> str:
    for quoted in re.findall(r"(?:--set|-s) (\S+)", text):
        key = quoted.strip("'\"`").partition("=")[0].rstrip(",.;)")
        known = key in keys() or key in sections()
        parents = [key.rpartition(".")[0]]
        if known or HOLE in key or not re.fullmatch(r"[a-z_]+(\.[\w-]+)+", key):
            continue
        if not _OWN_KEYS.match(key) and parents[0] not in keys():
            return f"a recipe has no key `{key}`"
    return ""


def test_there_are_texts() -> None:
    assert len(FIXES) > 500


def test_every_key_that_a_fix_sets_is_one_of_a_recipe() -> None:
    assert not [(at, fault) for at, text in FIXES if (fault := _fault_of_set(text))]


def test_every_command_of_a_fix_is_one_of_miles() -> None:
    faults = []
    for at, text in FIXES:
        for found in _COMMAND.finditer(text):
            line = text[found.start() :].split("   #")[0].split("`")[0].split("\n")[0]
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                words = line.split()
            if fault := _fault_of_command(words):
                faults.append((at, fault, line.replace(HOLE, "{}")))
    assert not faults


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("miles launch --recipe x --gpus 8", ""),
        ("miles lunch", "has no `lunch`"),
        ("miles launch --dry", "has no option --dry"),
    ],
)
def test_what_does_not_exist_is_found(line: str, fault: str) -> None:
    found = _fault_of_command(line.split())
    assert fault in found and bool(fault) == bool(found)
