"""Agents and their tools by name: built in, an entry point, or an import path. What they do is
written elsewhere; `episode` plays them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from milescli.core.imports import import_object
from milescli.core.plug_points import AGENTS, GENERATIONS, TOOLS
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Agent
from milescli.rollout.tool_schema import schema_of

_CREATED: dict[tuple[str, str], Agent] = {}


def create_agent(path: str, settings: Rollout) -> Agent:
    """Return the agent at an import path. If it is a class, return the instance that this process
    shares for the recipe's `rollout`."""
    agent: Any = import_object(path)
    if not inspect.isclass(agent):
        return agent
    key = (path, settings.model_dump_json())
    if key not in _CREATED:
        _CREATED[key] = agent(settings)
    return _CREATED[key]


def is_built_in(rollout: Rollout) -> bool:
    """Return True if neither the agent nor any of its tools is the user's."""
    return rollout.agent in AGENTS.builtin and all(name in TOOLS.builtin for name in rollout.tools)


def plays_here(rollout: Rollout) -> bool:
    """Return True if episodes are played in the driver, not in a process for the user's code."""
    return is_built_in(rollout) and rollout.generation in GENERATIONS.builtin


def tool_schemas(rollout: Rollout) -> list[Mapping[str, Any]]:
    """Return the schemas of `rollout.tools`, in OpenAI's form. Raises RecipeError if a tool cannot
    be loaded, or does not declare its parameters."""
    return [schema_of(tool, name=name) for name, tool in named_tools(rollout).items()]


def require_agent(rollout: Rollout) -> None:
    """Raise MilesError if the agent cannot work on this machine: a tool cannot work or be loaded,
    or the environment lacks the key of an endpoint."""
    for tool in named_tools(rollout).values():
        if require := getattr(tool, "require", None):
            require(rollout)
    if is_built_in(rollout):
        create_agent(AGENTS.path_of(rollout.agent), rollout)


def named_tools(rollout: Rollout) -> dict[str, Any]:
    """Load `rollout.tools`, by the names under which the model calls them: the name in the table,
    or of the function. Raises RecipeError if one cannot be loaded."""
    found = {}
    for name in rollout.tools:
        tool = TOOLS.resolve(name)
        found[name.rpartition(":")[2]] = tool
    return found
