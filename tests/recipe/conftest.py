"""A place with its own home and working directory, and a recipe that is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.recipe.load import LoadedRecipe, load

SMALL = "model: {scratch: {}}\ndata: {prompts: task:sums}\n"


class Place:
    """Files that a recipe may come from."""

    def __init__(self, base: Path) -> None:
        self.cwd, self.home = base / "work", base / "home"
        self.cwd.mkdir()
        (self.home / ".config" / "miles").mkdir(parents=True)

    def recipe(self, text: str = SMALL) -> str:
        """Write a recipe; returns what `--recipe` takes."""
        (self.cwd / "my.yaml").write_text(text)
        return "my.yaml"

    def load(self, text: str = SMALL, *, sets: list[str] | None = None, **options) -> LoadedRecipe:  # type: ignore[no-untyped-def]
        """Load it under the given layers."""
        environ = options.pop("environ", {})
        return load(
            self.recipe(text),
            sets=sets or [],
            environ=environ,
            cwd=self.cwd,
            home=self.home,
            **options,
        )

    def config(self, text: str) -> None:
        """~/.config/miles/config.yaml"""
        (self.home / ".config" / "miles" / "config.yaml").write_text(text)

    def local(self, text: str) -> None:
        """./miles.yaml"""
        (self.cwd / "miles.yaml").write_text(text)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
