"""`hf:NAME[@REVISION][:SUBSET][:SPLIT]`: how a recipe names a data set of the hub. Parses the
spelling; fetches nothing (`backends.hub` does)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from milescli.core.errors import RecipeError

HUB_PREFIX = "hf:"
_SPELLING = re.compile(
    r"hf:(?P<name>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?"
    r"(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """One split of one data set."""

    name: str
    """As the hub spells it: `openai/gsm8k`."""
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    subset: str | None
    """What the card calls `config_name`; None: the only one, or the default."""
    split: str | None
    """None: the only one, or `train`."""

    def spelled(self) -> str:
        """As a recipe writes it."""
        revision = f"@{self.revision}" if self.revision else ""
        tail = (
            f":{self.subset}:{self.split or 'train'}"
            if self.subset
            else f":{self.split}"
            if self.split
            else ""
        )
        return f"{HUB_PREFIX}{self.name}{revision}{tail}"


def is_hub(value: str) -> bool:
    """Whether a value of `data.*` means the hub."""
    return value.startswith(HUB_PREFIX)


def parse_hub(value: str, *, key: str) -> HubData:
    """`hf:openai/gsm8k:main:train`; one part behind the name is the split. `key`: the recipe's key,
    for RecipeError."""
    match = _SPELLING.fullmatch(value)
    if match is None:
        raise RecipeError(
            f"`{key}` cannot be `{value}`",
            why="a data set of the hub is written hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT, "
            "with @REVISION behind the name",
            fix=f"--set {key}=hf:openai/gsm8k:main:train",
        )
    first, second = match["first"], match["second"]
    return HubData(
        name=match["name"],
        revision=match["revision"],
        subset=first if second else None,
        split=second or first,
    )
