"""Servers of tools that speak MCP, as `rollout.mcp` names them. Part of the schema."""

from __future__ import annotations

from pydantic import Field

from milescli.recipe.section import Section


class McpServer(Section):
    """A server of tools: a program that the run starts and ends, or an address."""

    command: list[str] = Field(default=[])
    """The program and its arguments, spoken to over its standard input and output: [python,
    server.py]. Empty: the server is at `url`."""
    url: str | None = None
    """Where it is had by HTTP: http://127.0.0.1:8000/mcp; null: it is started by `command`."""
    env: list[str] = Field(default=[])
    """Names of environment variables that the program is given beside HOME, LOGNAME, PATH, SHELL,
    TERM and USER. Their values are written nowhere."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key for `url`, sent as `Authorization:
    Bearer`; null: none is sent. The key itself is written nowhere."""
    tools: list[str] | None = None
    """Which of its tools the model may call; null: all."""
