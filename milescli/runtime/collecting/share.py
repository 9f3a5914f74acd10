"""Divides a run's resources among collecting processes: concurrent requests, environment processes,
and the nodes that host these. Called by `build` and by the processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from milescli.agents.environment_fleet import num_processes
from milescli.recipe.schema import Recipe
from milescli.recipe.section import Section

S = TypeVar("S", bound=Section)
BOUNDS = ("concurrency", "num_at_once")
"""Keys that limit how many requests or processes run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Describes the share of one process."""

    count: int
    """Number of processes that collect by the same recipe."""
    on_node: int
    """Number of these processes on its node."""
    other_nodes: Sequence[int]
    """Nodes without such a process, which host environments of this one."""


def share_of(
    place: int, *, nodes: Sequence[int], all_nodes: Sequence[int], count: int | None = None
) -> Share:
    """Return the share of a process. `nodes`: [processes] where each of the run's is; `all_nodes`:
    of the run; `count`: processes for the same adapter; None: there are no adapters."""
    free = [node for node in all_nodes if node not in nodes]
    return Share(
        count=len(nodes) if count is None else count,
        on_node=nodes.count(nodes[place]),
        other_nodes=free[place :: len(nodes)],
    )


def collector_name(number: int, adapter: str | None) -> str:
    """Return the name of a process for messages."""
    return f"collector {number}" + (f" of {adapter}" if adapter is not None else "")


def part_of(number: int) -> str:
    """Return the name of the part of a journal that a process writes."""
    return f"collector-{number}"


def shared_recipe(recipe: Recipe, share: Share) -> Recipe:
    """Return the recipe for one process: together the processes send as many requests to endpoints
    at once as the recipe allows, and have as many environments on a node as one driver would."""
    shared = _divided(recipe, share.count)
    if share.on_node == 1:
        return shared
    settings = recipe.rollout.environment
    here = num_processes(settings, num_cores=len(os.sched_getaffinity(0)))
    own = settings.model_copy(update={"processes": max(1, here // share.on_node)})
    rollout = shared.rollout.model_copy(update={"environment": own})
    return shared.model_copy(update={"rollout": rollout})


def _divided(section: S, count: int) -> S:
    """Return a section whose bounds are divided by `count`, at any depth, but at least 1."""
    changed = dict[str, Any]()
    for name in type(section).model_fields:
        value: Any = getattr(section, name)
        if isinstance(value, Section):
            new: Any = _divided(value, count)
        elif isinstance(value, dict):
            new = {
                key: _divided(item, count) if isinstance(item, Section) else item
                for key, item in value.items()
            }
        elif name in BOUNDS and value is not None:
            new = max(1, value // count)
        else:
            continue
        changed[name] = new
    return section.model_copy(update=changed) if changed else section
