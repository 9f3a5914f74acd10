"""Plug points as a table, and what was written or checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.console.output import Output

if TYPE_CHECKING:
    from milescli.listings.plugins import PlugPoint


def show_points(points: Sequence[PlugPoint], *, output: Output) -> None:
    """One line a plug point."""
    output.json(
        "plugins",
        {
            "plugins": [
                {
                    "kind": point.kind,
                    "key": point.key,
                    "about": point.about,
                    "signature": point.signature,
                    "names": point.registry.names(),
                    "contract": point.contract,
                }
                for point in points
            ]
        },
    )
    output.table(
        ["kind", "recipe key", "what it does", "signature", "there are"],
        [
            (
                point.kind,
                point.key,
                point.about,
                point.signature,
                ", ".join(point.registry.names()),
            )
            for point in points
        ],
    )
    output.note("\na key takes one of these names, or an import path of yours: mypkg.module:name")
    output.note("miles plugins new reward my_reward   a working file, and its test")
    output.note("miles plugins check my_reward:my_reward   does it bear its contract?")


def show_written(point: PlugPoint, files: Sequence[Path], *, output: Output) -> None:
    """And what to do with them."""
    name = files[0].stem
    output.json("plugin_written", {"kind": point.kind, "files": [str(file) for file in files]})
    output.text(f"wrote {' and '.join(file.name for file in files)}")
    output.note("export PYTHONPATH=$PWD")
    output.note(f"miles plugins check {name}:{name} {point.kind}")
    output.note(f"miles launch --recipe quickstart --set {point.command_part(f'{name}:{name}')}")


def show_checked(point: PlugPoint, path: str, *, output: Output) -> None:
    """That all is well."""
    output.json("plugin_checked", {"kind": point.kind, "path": path, "bears_its_contract": True})
    output.text(f"`{path}` is a good {point.kind}: --set {point.command_part(path)}")
