"""The page's own files: what lies in `static/`, and the charts of others in `vendored/`. Nothing
else of the disk has a URL."""

from __future__ import annotations

from pathlib import Path

from milescli.web.paths import below
from milescli.web.refusals import NotFound

PACKAGE = Path(__file__).resolve().parents[1]
STATIC = PACKAGE / "web" / "static"
VENDORED = PACKAGE / "vendored"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
"""Ending -> what it is; files of others are not sent."""


def static_file(name: str) -> tuple[bytes, str]:
    """(content, media type) of a URL below `/static/`. Raises NotFound."""
    folder = VENDORED if name.startswith("vendored/") else STATIC
    file = below(folder, name.removeprefix("vendored/"))  # a link, where a tool installs by links
    if file.suffix not in TYPES or not file.is_file():
        raise NotFound(
            f"there is no page `{name[:200]}`", why="it is no file of the page", fix="open /"
        )
    return file.read_bytes(), TYPES[file.suffix]
