"""What the Markdown files name is there: links, and paths of this repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
