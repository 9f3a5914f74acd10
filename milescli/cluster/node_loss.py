"""Chooses the computers of a run that resumes after losing some: spare nodes, the remaining ones,
or those that return, according to `machine.on_node_loss`. Called by resume."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.cluster.nodes import RunNodes, TooFewNodes, find_nodes
from milescli.core.units import format_duration
from milescli.recipe.layers import Origin, SettingsLayer
from milescli.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from milescli.console.output import Output

CHECK_INTERVAL_S = 5.0
"""Seconds between two checks while waiting for nodes."""
_KEY = "machine.on_node_loss"


def remaining_nodes(loaded: LoadedRecipe, *, output: Output) -> tuple[LoadedRecipe, RunNodes]:
    """Return the remaining nodes, and the recipe for that many. Raises as `find_nodes` does, and
    TooFewNodes if none remains, if the recipe requires spare nodes, or if none joined in time."""
    try:
        return loaded, find_nodes(loaded, output=output)
    except TooFewNodes as error:
        how = loaded.recipe.machine.on_node_loss
        if how == "spare" or (how == "shrink" and not error.num_usable):
            raise
        if how == "wait":
            return loaded, _wait(loaded, error, output=output)
        fewer = with_num_nodes(error.num_usable, loaded)
        output.warn(f"{error.what}: the run is planned for these ({_KEY}=shrink)")
        return fewer, find_nodes(fewer, output=output)


def with_num_nodes(num_nodes: int, loaded: LoadedRecipe) -> LoadedRecipe:
    """Return the same recipe for another number of nodes."""
    machine = loaded.recipe.machine.model_copy(update={"nodes": num_nodes})
    recipe = loaded.recipe.model_copy(update={"machine": machine})
    by_loss = Origin(layer=SettingsLayer.SET, where=f"{_KEY}=shrink")
    return replace(loaded, recipe=recipe, origins={**loaded.origins, "machine.nodes": by_loss})


def _wait(loaded: LoadedRecipe, error: TooFewNodes, *, output: Output) -> RunNodes:
    bound_s = loaded.recipe.fault.window_s
    output.warn(f"{error.what}: waiting {format_duration(bound_s)} at most ({_KEY}=wait)")
    deadline = time.monotonic() + bound_s
    while True:
        time.sleep(CHECK_INTERVAL_S)
        try:
            return find_nodes(loaded, output=output)
        except TooFewNodes as still:
            if time.monotonic() >= deadline:
                still.why += f"\nnone came within {format_duration(bound_s)} (fault.window_s)"
                raise
