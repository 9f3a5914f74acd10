"""What a layer of a recipe is made of: values by key, each with who said so. Nothing is read here;
`layers` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SettingsLayer(StrEnum):
    """Where a value can come from, weakest first."""

    DEFAULT = "default"
    ALGORITHM = "algorithm"
    RECIPE = "recipe"
    FILE = "file"
    ENV = "env"
    SET = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who said so."""

    layer: SettingsLayer
    where: str = ""
    """`quickstart.yaml:12`, `gspo`, `MILES_RUN__NAME`, `--set train.steps=3`; empty for a
    default."""

    def __str__(self) -> str:
        return (
            self.where if self.layer is SettingsLayer.SET else f"{self.layer} {self.where}".strip()
        )

    @classmethod
    def parse(cls, text: str) -> Origin:
        """The inverse of `str`."""
        if text.startswith("--"):
            return cls(layer=SettingsLayer.SET, where=text)
        layer, _, where = text.partition(" ")
        return cls(layer=SettingsLayer(layer), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as one layer sets it."""

    value: object
    """A YAML value; None or {} where the key is an optional section."""
    text: str
    """The user's own words."""
    origin: Origin
    comment: str = ""


Table = dict[str, KeyValue]
