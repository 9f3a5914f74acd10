"""`recipe`, `plan`, `manifest`: what was asked for and what was decided, each with where it comes
from. Of a run of another version of miles too."""

from __future__ import annotations

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.insight.facts import RunFacts, read_facts
from milescli.recipe import reader
from milescli.web.asked import Asked, Json

MAX_BYTES = 4 * 2**20
"""Of a recipe that is read."""


def recipe(asked: Asked) -> Json:
    """Every key by its dotted name, its value, and who said so."""
    return {"keys": _keys(asked.run) or _keys(asked.with_logs)}


def plan(asked: Asked) -> Json:
    """plan.json; the layouts that were weighed beside its own stand under `alternatives`."""
    told = dict(_facts(asked).plan)
    forecast = told.get("forecast") or {}
    empty: Json = {"decisions": [], "slots": [], "trainer": {}, "engines": {}, "roles": []}
    return {**empty, **told, "alternatives": forecast.get("alternatives", [])}


def manifest(asked: Asked) -> Json:
    """manifest.json; the recipe in it stands under `recipe`."""
    return {name: value for name, value in _facts(asked).manifest.items() if name != "recipe"}


def _facts(asked: Asked) -> RunFacts:
    own = read_facts(asked.run)
    return own if own.plan or own.manifest else read_facts(asked.with_logs)


def _keys(run: RunDir) -> list[Json]:
    try:
        if run.recipe_file.stat().st_size > MAX_BYTES:
            return []
        text = run.recipe_file.read_text(encoding="utf-8", errors="replace")
        root = reader.read(text, source=str(run.recipe_file))
    except (OSError, RecipeError):
        values = read_facts(run).recipe  # as the manifest has it, without origins
        return [{"key": key, "value": value, "origin": ""} for key, value in values.items()]
    return _flat(root)


def _flat(node: reader.YamlNode, above: str = "") -> list[Json]:
    """A mapping over several lines is a section; one on a line, `{a: 1}`, is a value."""
    if not isinstance(node.value, dict):
        return []
    keys = list[Json]()
    for name, child in node.value.items():
        key = f"{above}{name}"
        is_section = isinstance(child.value, dict) and not child.comment
        if is_section and child.value:
            keys += _flat(child, f"{key}.")
        else:
            keys.append({"key": key, "value": _plain(child), "origin": child.comment})
    return keys


def _plain(node: reader.YamlNode) -> object:
    if isinstance(node.value, dict):
        return {name: _plain(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(child) for child in node.value]
    return node.value
