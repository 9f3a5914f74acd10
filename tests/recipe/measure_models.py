"""Writes `templates/shapes.json`, the fields of the models' published config.json that miles reads,
and `templates/models.json`: what the models of the recipes are, and where the planner finds room.

    python tests/recipe/measure_models.py FOLDER      # of files ORG--NAME.json; without FOLDER: the
    shapes that ship

Run it again after a change of the planner or of a recipe, and with FOLDER for a new model or a
field that is newly read. Not a test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from milescli.listings.recipes import NO_MACHINE, smallest_machine
from milescli.models import ModelFacts, parse_facts, table
from milescli.recipe.load import load
from milescli.recipe.templates import (
    MODELS_FILE,
    SHAPES_FILE,
    shipped_shape,
    template_names,
    templates_dir,
)

MEASURED_FROM = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
}
"""The instruction-tuned release -> its base, which differs only in the tokens that end a
response."""
ABOUT = (
    "Written by tests/recipe/measure_models.py from published config.json files. models: "
    "parameters without multi-token-prediction layers "
    "and vision towers that are passed through, counted from miles's own weight tables. "
    "smallest_machines: the planner's estimate, not measured; none: no room on "
    "64 x 8 H100, or the model cannot be trained."
)
ABOUT_SHAPES = (
    "Written by tests/recipe/measure_models.py: of each model's published config.json the fields "
    "that miles reads, so that a run is planned "
    "without the hub. A launch goes by the config.json that it fetches."
)


class Watched(dict[str, object]):
    """A config that notes which of its fields are read."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(
            {
                key: Watched(value) if isinstance(value, dict) else value
                for key, value in config.items()
            }
        )
        self.read: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self):  # type: ignore[override]
        """Whoever copies a dict reads all of it."""
        self.read.update(super().keys())
        return super().keys()

    def items(self):  # type: ignore[override]
        """As `keys`."""
        self.read.update(super().keys())
        return super().items()

    def what_was_read(self) -> dict[str, object]:
        """The fields that were read, in the order of the file."""
        kept = {key: dict.__getitem__(self, key) for key in dict.keys(self) if key in self.read}
        return {
            key: value.what_was_read() if isinstance(value, Watched) else value
            for key, value in kept.items()
        }


def shape_of(config: dict[str, object]) -> dict[str, object]:
    """The part of a config.json that makes its ModelFacts."""
    watched = Watched(config)
    facts = parse_facts(watched)
    shape = json.loads(json.dumps(watched.what_was_read()))
    assert parse_facts(shape) == facts, "a field was read past the watch"
    return shape


def shapes(folder: Path | None) -> dict[str, dict[str, object]]:
    """Name on the hub -> shape, of all models that recipes name; those that the folder lacks keep
    the shape that ships."""
    measured = {}
    for name in template_names():
        model = load(name, environ={}, cwd=Path("/"), home=Path("/")).recipe.model.path
        if model is None:
            continue
        name = f"{MEASURED_FROM.get(model, model).replace('/', '--')}.json"
        if folder is not None and (folder / name).is_file():
            shape = shape_of(json.loads((folder / name).read_text(encoding="utf-8")))
        else:
            shape = shipped_shape(model)
            assert shape is not None, f"{model} has no shape yet: name a folder with {name}"
        measured[model] = shape
    return dict(sorted(measured.items()))


def measure(known: dict[str, ModelFacts]) -> dict[str, object]:
    """What `models.json` says."""
    models: dict[str, dict[str, object]] = {}
    machines: dict[str, str] = {}
    for name in template_names():
        recipe = load(name, environ={}, cwd=Path("/"), home=Path("/")).recipe
        if recipe.model.path is None:
            continue
        facts = known[recipe.model.path]
        counted = table(facts)
        models[recipe.model.path] = {
            "family": facts.family,
            "parameters": counted.num_parameters,
            "active": counted.num_active_parameters,
        }
        machines[name] = smallest_machine(recipe, facts) or NO_MACHINE
    return {"about": ABOUT, "models": dict(sorted(models.items())), "smallest_machines": machines}


def write_shapes(shapes: dict[str, dict[str, object]]) -> None:
    """One line a model."""
    lines = ",\n".join(
        f"  {json.dumps(model)}: {json.dumps(shape, separators=(',', ':'))}"
        for model, shape in shapes.items()
    )
    text = f'{{\n "about": {json.dumps(ABOUT_SHAPES)},\n "models": {{\n{lines}\n }}\n}}\n'
    (templates_dir() / SHAPES_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    shape_by_model = shapes(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    write_shapes(shape_by_model)
    measured = measure({model: parse_facts(shape) for model, shape in shape_by_model.items()})
    (templates_dir() / MODELS_FILE).write_text(
        json.dumps(measured, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(measured["smallest_machines"], indent=1))
