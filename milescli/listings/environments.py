"""Implements `miles envs` and `miles tools`: lists built-in ones and plug-ins, with whether they
are usable here; checks an environment against its contract in a separate process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from milescli.core.errors import MilesError, RecipeError
from milescli.core.imports import import_object
from milescli.core.plug_points import ENVIRONMENTS, TOOLS
from milescli.core.registry import PlugPoint
from milescli.core.types import Prompt
from milescli.data.prompt_encoder import TokenlessEncoder
from milescli.data.prompt_source import load_source
from milescli.data.tasks import is_task
from milescli.recipe.data import Data
from milescli.recipe.schema import Rollout
from milescli.rollout.environment_contract import NUM_EPISODES, EnvironmentCheck
from milescli.rollout.environments import numbered_rows, require
from milescli.workers.isolated import IsolatedPlugin

CHECK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPlugin:
    """Describes one environment or one tool."""

    name: str
    about: str
    takes: str
    """Settings of an environment, or arguments of a tool."""
    lacks: str | None
    """Why it is not usable here; None if it is."""
    mend: str | None = None
    """Command that makes it usable."""


def environments() -> list[ListedPlugin]:
    """List all environments that are known by name here."""
    return [_plugin_row(name, ENVIRONMENTS) for name in ENVIRONMENTS.names()]


def tools() -> list[ListedPlugin]:
    """List all tools that are known by name here."""
    return [_plugin_row(name, TOOLS) for name in TOOLS.names()]


def _plugin_row(name: str, point: PlugPoint) -> ListedPlugin:
    path = point.path_of(name)
    plugin: Any = import_object(path, kind=point.kind, key=point.key, setting=point.setting)
    lacks = fix = None
    try:
        if point is ENVIRONMENTS:
            require(plugin, {})
        elif (check := getattr(plugin, "require", None)) is not None:
            check(Rollout(tools=[name]))
    except MilesError as error:
        lacks, fix = error.why, error.fixes[0] if error.fixes else None
    return ListedPlugin(
        name=name,
        about=_first_sentence(plugin),
        takes=", ".join(_parameters(plugin, point)),
        lacks=lacks,
        mend=fix,
    )


def _parameters(plugin: Any, point: PlugPoint) -> list[str]:
    called = plugin
    if point is TOOLS and inspect.isclass(plugin):
        called = plugin.__call__
    parameters = inspect.signature(called).parameters.values()
    return [
        str(each).partition(":")[0].partition("=")[0].strip()
        + ("" if each.default is inspect.Parameter.empty else f"={each.default!r}")
        for each in parameters
        if each.name != "self"
    ]


def _first_sentence(plugin: Any) -> str:
    return " ".join((inspect.getdoc(plugin) or "").split()).partition(". ")[0].rstrip(".")


def rows_of(data: str | None) -> list[Prompt]:
    """Return the first rows of a data file or a `task:NAME`; if `data` is None, return numbered
    prompts. Raises DataError."""
    if data is None:
        return numbered_rows(NUM_EPISODES)
    with TemporaryDirectory() as folder:
        loaded = load_source(
            Data(prompts=data if is_task(data) else str(Path(data).expanduser().absolute())),
            "prompts",
            tokenizer=TokenlessEncoder(),
            seed=0,
            base_dir=folder,
            needs_label=False,
        )
        return loaded.source.first(NUM_EPISODES)


def check_environment(name: str, settings: Mapping[str, Any], data: str | None) -> EnvironmentCheck:
    """Run the contract of an environment and return what was observed. Raises MilesError if it
    cannot be loaded or does not satisfy the protocol."""
    plugin = ENVIRONMENTS.resolve(name)
    require(plugin, settings)
    rows = rows_of(data)
    there = IsolatedPlugin(
        "milescli.rollout.environment_contract:check_environment",
        what=f"the environment `{name}`",
        plugin=plugin,
        bound_s=CHECK_TIMEOUT_S,
    )
    try:
        seen: EnvironmentCheck = there(name, settings=dict(settings), rows=rows)
    except RecipeError as error:
        if name not in ENVIRONMENTS.builtin or not error.fixes[0].startswith("fix `"):
            raise
        # nothing of the user's is to be mended: it was made with what its package does not take
        fix = f"miles env check {name} --settings '{{...}}'   # with other settings"
        raise RecipeError(error.what, why=error.why, fix=fix) from None
    return seen
