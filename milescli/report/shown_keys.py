"""The recipe of a run as others may see it: each key with its value and who set it, read off
recipe.yaml line by line, so that keys of another version of miles are shown too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from milescli.core.private import without_paths, without_secrets_in

_DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """One key of a recipe."""

    name: str
    """Dotted: train.optimizer.lr"""
    value: str
    """Without secrets and places of the machine."""
    origin: str
    """default, recipe quickstart.yaml:6, --set, ..."""

    @property
    def is_set(self) -> bool:
        """By somebody, in place of the default."""
        return self.origin != _DEFAULT


def read_keys(file: Path) -> list[ShownKey]:
    """In the file's order; nothing where it cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    keys, above = list[ShownKey](), list[str]()
    for line in lines:
        body, _, comment = line.rpartition("  # ")
        body = body or line
        name, colon, text = body.strip().partition(":")
        if not colon or name.startswith("#"):
            continue
        del above[(len(body) - len(body.lstrip())) // 2 :]
        if not text.strip():
            above.append(name)
            continue
        full = ".".join([*above, name])
        keys.append(
            ShownKey(name=full, value=_shown(full, text.strip()), origin=_origin(comment.strip()))
        )
    return keys


def _shown(name: str, text: str) -> str:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    value = without_secrets_in(value, name=name)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _origin(comment: str) -> str:
    """Who set it. What stood behind `--set KEY=` is the value, which may be a secret."""
    return "--set" if comment.startswith("--set ") else without_paths(comment) or _DEFAULT
