"""Tests of `rollout.mcp` in a recipe: read, written again, and refused where it cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.agents import McpServer, find_warnings
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.resolved import load_resolved, resolved_yaml

MCP = """\
model: {scratch: {}}
data: {prompts: task:sums}
rollout:
  agent: tools
  mcp:
    files: {command: [python, server.py, 007], env: [TOKEN], tools: [read]}
    "2":
      url: http://127.0.0.1:8000/mcp
"""


def _load(folder: Path, *sets: str) -> LoadedRecipe:
    (folder / "my.yaml").write_text(MCP)
    return load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)


def test_servers_are_read_and_written_without_loss(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    assert loaded.recipe.rollout.mcp == {
        "files": McpServer(command=["python", "server.py", "007"], env=["TOKEN"], tools=["read"]),
        "2": McpServer(url="http://127.0.0.1:8000/mcp"),
    }
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(loaded))
    assert load_resolved(tmp_path / "resolved.yaml").recipe == loaded.recipe


def test_servers_on_the_command_line_take_the_place_of_the_recipes(tmp_path: Path) -> None:
    loaded = _load(tmp_path, "rollout.mcp={a: {command: [a]}}")
    assert loaded.recipe.rollout.mcp == {"a": McpServer(command=["a"])}


@pytest.mark.parametrize(
    ("mcp", "says"),
    [
        ("{f: {comand: [a]}}", "`f` is wrong in the unknown key `comand`"),
        ("{f: {command: a}}", r"`f` is wrong in `command` \(a list of texts\)"),
        ("{f: 3}", "`f` is not a mapping"),
        ("[{command: [a]}]", "a mapping of names to mappings, each of command"),
        ("{f: {}}", "sets neither"),
        ("{f: {command: [a], url: 'http://h/mcp'}}", "sets both"),
        ("{f: {url: 'ftp://h'}}", "it is not the address of an HTTP server"),
        ("{f: {url: 'http://me:word@h'}}", "contains a user name or a password"),
        ("{f: {url: 'http://h', env: [A]}}", "`env` has no effect"),
        ("{f: {command: [a], api_key_env: A}}", "`api_key_env` has no effect"),
        ("{f: {command: [a], tools: []}}", "list of `tools` is empty"),
        ("{f: {command: [a], tools: [b]}, g: {command: [a], tools: [b]}}", "have the name `b`"),
        ("{}", "`rollout.tools` and `rollout.mcp` are empty"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, mcp: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        _load(tmp_path, f"rollout.mcp={mcp}")


def test_a_value_in_place_of_a_variable_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not name an environment variable") as caught:
        _load(tmp_path, "rollout.mcp={f: {command: [a], env: [TOKEN=geheim]}}")
    assert "geheim" not in str(caught.value)


def test_servers_that_nobody_asks_are_doubted(tmp_path: Path) -> None:
    loaded = _load(tmp_path, "rollout.agent=single_turn")
    assert "`rollout.mcp` are never called" in str(find_warnings(loaded.recipe))
