"""Rules of the servers in `rollout.mcp`. Pure; called by `check_agents`."""

from __future__ import annotations

import re

from milescli.core.errors import RecipeError
from milescli.recipe.check_url import check_url
from milescli.recipe.mcp import McpServer
from milescli.recipe.schema import Rollout

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLE = "http://127.0.0.1:8000/mcp"


def check_mcp(rollout: Rollout) -> None:
    """Raises RecipeError where a server cannot be meant."""
    for name, server in rollout.mcp.items():
        _check_one(name, server)


def _check_one(name: str, server: McpServer) -> None:
    if bool(server.command) == (server.url is not None):
        raise RecipeError(
            f"the MCP server `{name}` is started or has an address",
            why=f"`rollout.mcp` says {'both' if server.command else 'neither'} for it: `command` "
            "and `url`",
            fix=[
                f"--set 'rollout.mcp={{{name}: {{command: [python, server.py]}}}}'",
                f"--set 'rollout.mcp={{{name}: {{url: {_EXAMPLE}}}}}'",
            ],
        )
    if server.url is not None:
        _check_url(name, server.url)
    unused = "env" if server.url is not None and server.env else None
    if server.command and server.api_key_env:
        unused = "api_key_env"
    if unused:
        raise RecipeError(
            f"`{unused}` does nothing for the MCP server `{name}`",
            why="`env` is given to a program (`command`), `api_key_env` sent to an address (`url`)",
            fix=f"write `{'api_key_env: NAME' if unused == 'env' else 'env: [NAME]'}` instead",
        )
    keys = [server.api_key_env] if server.api_key_env is not None else []
    if not all(_VARIABLE.fullmatch(variable) for variable in [*server.env, *keys]):
        raise RecipeError(  # which may be a secret, so it is not shown
            f"the MCP server `{name}` names no environment variable",
            why="`env` and `api_key_env` hold names; values come from the environment, and are "
            "written nowhere",
            fix="write `env: [MY_TOKEN]`, and export MY_TOKEN where the run begins",
        )
    if server.tools is not None and not server.tools:
        raise RecipeError(
            f"no tool of the MCP server `{name}` may be called",
            why="its `tools` are an empty list",
            fix="write `tools: null` for all of them, or take the server out of `rollout.mcp`",
        )


def _check_url(name: str, url: str) -> None:
    key = f"rollout.mcp.{name}"
    try:
        check_url(url, key=f"{key}.url", section=key, example=_EXAMPLE)
    except RecipeError as error:  # a server in the mapping has no key that `--set` takes
        fix = f"write `{name}: {{url: {_EXAMPLE}, api_key_env: NAME}}`, or without `api_key_env`"
        raise RecipeError(error.what, why=error.why, fix=fix) from None
