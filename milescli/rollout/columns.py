"""Which columns of a data file are the prompt, the label and the worked response: as the recipe
says, else by their names. Called by `rows`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from milescli.core.errors import DataError, nearest

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "input")
LABEL_COLUMNS = ("label", "answer", "solution", "target")
DEMONSTRATION_COLUMN = "demonstration"

PathField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
"""The key under `data` that named the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns are read."""

    prompt: str
    label: str | None
    needs_label: bool
    """A row without one cannot be used."""
    demonstration: str | None
    tools: str | None = None
    """None: no row has any."""

    @property
    def names(self) -> list[str]:
        """All that are."""
        named = (self.prompt, self.label, self.demonstration, self.tools)
        return [name for name in named if name is not None]


def find_columns(
    names: list[str],
    path: Path,
    *,
    field: PathField,
    prompt_key: str | None,
    label_key: str | None,
    needs_label: bool | None,
) -> Columns:
    """Raises DataError where one is ambiguous, or is wanted and absent. `needs_label`: None where
    it is not known whether anybody looks at it."""
    prompt = _column(
        names, path, wanted=prompt_key, known=PROMPT_COLUMNS, key="prompt_key", is_needed=True
    )
    demonstration = DEMONSTRATION_COLUMN if DEMONSTRATION_COLUMN in names else None
    is_needed = needs_label
    if field == "demonstrations" and demonstration is None and prompt != "messages":
        is_needed = True
    label = _column(
        names, path, wanted=label_key, known=LABEL_COLUMNS, key="label_key", is_needed=is_needed
    )
    assert prompt is not None, names
    return Columns(
        prompt=prompt, label=label, needs_label=bool(is_needed), demonstration=demonstration
    )


def _column(
    names: list[str],
    path: Path,
    *,
    wanted: str | None,
    known: tuple[str, ...],
    key: str,
    is_needed: bool | None,
) -> str | None:
    role = key.removesuffix("_key")
    there = f"its columns are {', '.join(names)}"
    if wanted is not None:
        if wanted in names:
            return wanted
        guess = nearest(wanted, names) or names[0]
        raise DataError(
            f"{path} has no column `{wanted}`", why=there, fix=f"--set data.{key}={guess}"
        )
    likely = [name for name in known if name in names]
    if len(likely) == 1:
        return likely[0]
    if likely and is_needed is not False:
        raise DataError(
            f"which column of {path} is the {role}?",
            why=f"{' and '.join(likely)} are both there; {there}",
            fix=[f"--set data.{key}={name}" for name in likely],
        )
    if not is_needed:
        return None
    guess = names[0] if role == "prompt" else names[-1]
    raise DataError(
        f"{path} has no {role} column",
        why=f"none of {', '.join(known)} is there; {there}",
        fix=f"--set data.{key}={guess}",
    )
