"""What the Markdown files name exists: links, headings, paths of this repository, verbs and their
flags, keys of recipes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from milescli.commands.app import app
from milescli.recipe.keys import keys, sections
from milescli.recipe.layers import readable_keys

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
OURS = r"(?:milescli|tests|docs|bench|templates|docker|completions)/[\w./-]+"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(rf"`(?:[\w -]+ )?({OURS})[^`]*`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in _anchors((page.parent / file) if file else page)
    ]
    assert not missing


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]
FILES = re.compile(r"\.(jsonl|json|parquet|arrow|csv|py|txt|yaml)$")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_and_keys_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    pieces = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    .+$", text, re.M)]
    wrong = [name for piece in pieces for name in (*_unknown_keys(piece), *_unknown_words(piece))]
    assert not wrong


@cache
def _flags() -> dict[str, set[str]]:
    """Return the flags of each verb."""
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {
            flag
            for one in (verb, *getattr(verb, "commands", {}).values())
            for option in one.params
            for flag in option.opts
        }
        for name, verb in verbs.items()
    }


@cache
def _keys() -> set[str]:
    return {*readable_keys(), *sections(), *keys()}


def _unknown_keys(piece: str) -> list[str]:
    named = re.findall(r"--set '?([\w.]+)=", piece)
    alone = re.fullmatch(r"([a-z]\w*(?:\.\w+)+)(?:=.*)?", piece.strip())
    if alone and alone[1].partition(".")[0] in sections() and not FILES.search(alone[1]):
        named.append(alone[1])
    return [name for name in named if name not in _keys()]


def _unknown_words(piece: str) -> list[str]:
    """Verbs, and flags that follow one."""
    wrong = []
    for verb, rest in re.findall(r"(?:^|[\s|;&(])miles ([a-z][\w-]*)([^|;#]*)", piece):
        if verb not in _flags():
            wrong.append(f"miles {verb}")
            continue
        flags = re.findall(r"(?<![\w-])--[a-z][\w-]+", rest)
        wrong += [
            f"miles {verb} {flag}" for flag in flags if flag not in {*_flags()[verb], "--help"}
        ]
    return wrong


def test_each_question_has_one_link_and_a_command() -> None:
    text = (ROOT / "docs" / "questions.md").read_text()
    questions = re.split(r"^(?=\*\*\d+\. )", text, flags=re.M)[1:]
    assert len(questions) == 20
    links = [len(re.findall(r"\]\(", question)) for question in questions]
    commands = [len(re.findall(r"^    miles ", question, re.M)) for question in questions]
    assert links == commands == [1] * 20


def test_a_guide_opens_with_its_purpose_and_a_command() -> None:
    guides = sorted((ROOT / "docs").glob("*.md"))
    late = {
        page.name: first
        for page in guides
        if not (first := _line_of_first_command(page)) or first > 12
    }
    assert len(guides) > 40 and not late


def _line_of_first_command(page: Path) -> int | None:
    numbered = enumerate(page.read_text().splitlines(), start=1)
    return next((number for number, line in numbered if re.match(r" {4}\w", line)), None)
