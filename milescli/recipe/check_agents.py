"""Rules of a recipe's agent and its tools. Pure; called by `check`."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.check_mcp import check_mcp
from milescli.recipe.schema import Recipe

CALLS_TOOLS = ("tools",)
"""Built-in agents that do nothing without tools."""
CALLS_NONE = ("single_turn", "environment")
PLAYS = "environment"


def check_agents(recipe: Recipe) -> None:
    """Raises RecipeError where the agent cannot do what is meant."""
    rollout = recipe.rollout
    if rollout.agent == PLAYS and rollout.environment.name is None:
        raise RecipeError(
            f"the agent `{PLAYS}` has no environment",
            why="`rollout.environment.name` is null",
            fix="--set rollout.environment.name=frozen_lake   # `miles envs` lists them",
        )
    if rollout.agent in CALLS_TOOLS and not rollout.tools and not rollout.mcp:
        raise RecipeError(
            f"the agent `{rollout.agent}` has no tools",
            why="`rollout.tools` and `rollout.mcp` are empty",
            fix="--set 'rollout.tools=[calculator]'   # or an import path, mypkg.tools:lookup",
        )
    check_mcp(rollout)
    called = [name.rpartition(":")[2] for name in rollout.tools]
    called += [tool for server in rollout.mcp.values() for tool in server.tools or ()]
    if twice := next((name for name in called if called.count(name) > 1), None):
        raise RecipeError(
            f"two tools are called `{twice}`",
            why="the model calls a tool by its name, and `rollout.tools` is "
            f"[{', '.join(rollout.tools)}]"
            + "".join(
                f", the MCP server `{name}` has [{', '.join(server.tools)}]"
                for name, server in rollout.mcp.items()
                if server.tools
            ),
            fix="give one of them another name, and take the other out of the recipe",
        )
    if recipe.data.chat_template == "none" and rollout.agent in (*CALLS_TOOLS, PLAYS):
        raise RecipeError(
            f"the agent `{rollout.agent}` needs a chat template",
            why="`data.chat_template=none` makes prompts raw text, and what comes back to the "
            "model are messages of a chat",
            fix="--set data.chat_template=chatml   # or a file with the template of its family",
        )


def doubt_about_agents(recipe: Recipe) -> str | None:
    """What is legal and probably not meant."""
    rollout = recipe.rollout
    if (rollout.tools or rollout.mcp) and rollout.agent in CALLS_NONE:
        key = "tools" if rollout.tools else "mcp"
        return (
            f"`rollout.{key}` are never called: the agent `{rollout.agent}` calls none; "
            "rollout.agent=tools does"
        )
    if rollout.environment.name is not None and rollout.agent in (*CALLS_TOOLS, "single_turn"):
        return (
            f"`rollout.environment` is never asked: the agent is `{rollout.agent}`; "
            f"rollout.agent={PLAYS} plays in it"
        )
    if rollout.agent in CALLS_TOOLS and rollout.tool_parser == "none":
        return "`rollout.tool_parser=none`: no call of a tool is ever seen"
    return None
